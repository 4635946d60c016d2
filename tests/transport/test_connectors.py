from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage import transport
from omnistage.contracts.errors import (
    ConfigurationError,
    InvalidRequestError,
    ProtocolError,
    StageLostError,
    UnavailableError,
)
from omnistage.contracts.messages import Submit
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import (
    InlineFrame,
    PayloadRef,
    SharedSegment,
    StageData,
    TensorRef,
)
from omnistage.contracts.tensors import ITEM_BYTES, HostTensor
from omnistage.transport import registry
from omnistage.transport.base import Connector
from omnistage.transport.codec import MessageDecoder, encode
from omnistage.transport.inline import InlineConnector
from omnistage.transport.registry import make_connector
from omnistage.transport.shared_memory import SharedMemoryConnector
from tests.transport.samples import fields, host_tensors, same_tensor, submit

CONNECTORS = [InlineConnector(), SharedMemoryConnector(0), SharedMemoryConnector(40)]


def across(connector: Connector, data: StageData) -> StageData:
    """Through a connector and the codec, released before anyone looks at the result."""
    ref, frames = connector.send(data)
    decoder = MessageDecoder(Submit)
    message, received = decoder.decode([bytes(f) for f in encode(submit(payload=ref), frames)])
    assert isinstance(message, Submit)
    arrived = connector.receive(message.payload, received)
    if ref.handle is not None:
        connector.release(ref.handle)
    assert connector.outstanding() == connector.outstanding_bytes() == 0
    return arrived


@pytest.mark.invariant("CONNECTOR-INV-002")
@pytest.mark.parametrize("connector", CONNECTORS)
@settings(max_examples=60)
@given(content=fields, tensors=st.dictionaries(st.text(max_size=4), host_tensors(), max_size=4))
def test_any_data_survives(
    connector: Connector, content: dict[str, Any], tensors: dict[str, HostTensor]
) -> None:
    sent = StageData(modality=Modality.HIDDEN, fields=content, tensors=tensors)
    arrived = across(connector, sent)
    assert (arrived.modality, arrived.fields) == (sent.modality, content)
    assert list(arrived.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert isinstance(arrived.tensors[name], HostTensor)
        assert same_tensor(arrived.tensors[name], tensor)


ARRAYS = {
    "contiguous": np.arange(12, dtype=np.float32).reshape(3, 4),
    "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "strided": np.arange(40, dtype=np.int64)[::3],
    "reversed": np.arange(9, dtype=np.uint16)[::-1],
    "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "big endian": np.arange(6, dtype=">f4"),
    "scalar": np.array(7, dtype=np.int8),
    "empty": np.zeros((3, 0, 2), dtype=np.float16),
    "read-only": np.frombuffer(b"\x01\x02\x03\x04", dtype=np.uint8),
    "complex": np.array([1 + 2j], dtype=np.complex64),
    "bool": np.array([[True], [False]]),
}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays_of_any_layout_survive(connector: Connector, name: str) -> None:
    array = ARRAYS[name]
    arrived = across(connector, StageData(modality=Modality.LATENT, tensors={"x": array}))
    result = arrived.tensors["x"].numpy()
    np.testing.assert_array_equal(result, array)
    assert result.shape == array.shape
    assert result.dtype.name == array.dtype.name


@pytest.mark.invariant("CONNECTOR-INV-002")
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_torch_tensors_of_every_dtype_survive(connector: Connector, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    raw = torch.arange(6 * ITEM_BYTES[dtype], dtype=torch.uint8)
    if dtype == "bool":
        raw = raw % 2
    tensor = raw.view(getattr(torch, dtype)).reshape(2, 3).t()
    sent = {"view": tensor, "scalar": tensor[0, 0], "empty": tensor[:0]}
    arrived = across(connector, StageData(modality=Modality.LATENT, tensors=sent))
    for name, expected in sent.items():
        result = arrived.tensors[name].torch()
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        width = getattr(torch, f"uint{8 * ITEM_BYTES[dtype]}") if dtype != "bool" else torch.bool
        flat = (t.contiguous().view(width).tolist() for t in (result, expected))
        assert next(flat) == next(flat)


def test_tensors_of_one_payload_share_one_aligned_segment() -> None:
    connector = SharedMemoryConnector(100)
    tensors = {"a": np.ones(101, np.uint8), "b": np.ones(5, np.uint8), "c": np.ones(300, np.uint8)}
    ref, frames = connector.send(StageData(modality=Modality.LATENT, tensors=tensors))
    a, b, c = (ref.tensors[name].place for name in "abc")
    assert isinstance(a, SharedSegment)
    assert isinstance(c, SharedSegment)
    assert (a.fd, a.token, a.offset, c.offset) == (c.fd, c.token, 0, 128)
    assert b == InlineFrame(0)
    assert [frame.nbytes for frame in frames] == [5]
    assert (ref.nbytes, connector.outstanding(), connector.outstanding_bytes()) == (406, 1, 428)
    connector.close()


def test_what_is_received_does_not_change_with_its_source() -> None:
    for connector in (InlineConnector(), SharedMemoryConnector(0)):
        source = np.zeros(64, np.uint8)
        ref, frames = connector.send(StageData(modality=Modality.LATENT, tensors={"x": source}))
        arrived = connector.receive(ref, frames).tensors["x"].numpy()
        source[:] = 1
        assert not arrived.any()
        assert not arrived.flags.writeable
        connector.close()


def test_fields_are_copied_and_tuples_become_lists() -> None:
    inner = [1, 2]
    ref, _ = InlineConnector().send(
        StageData(modality=Modality.TEXT, fields={"list": inner, "pair": (1, ("a",))})
    )
    inner.append(3)
    assert ref.fields == {"list": [1, 2], "pair": [1, ["a"]]}


def endless() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1: "x"}, r"fields\['v'\] has the key 1 of type int"),
        ([0, {"a": object()}], r"fields\['v'\]\[1\]\['a'\] is a builtins.object"),
        (np.float64(1), "numpy.float64.*item"),
        (np.zeros(2), "numpy.ndarray.*tensors"),
        ({1, 2}, "builtins.set"),
        (2**64, "18446744073709551616"),
        (-(2**63) - 1, "allowed are"),
        ("\ud800", "Unicode"),
        (endless(), "64 levels"),
        (Modality.TEXT, "Modality"),
    ],
)
@pytest.mark.parametrize("connector", CONNECTORS[:2])
def test_a_value_that_cannot_travel_is_named(
    connector: Connector, value: object, named: str
) -> None:
    data = StageData(
        modality=Modality.TEXT, fields={"v": value}, tensors={"x": np.ones(99, np.uint8)}
    )
    with pytest.raises(InvalidRequestError, match=named):
        connector.send(data)
    assert connector.outstanding() == 0


@pytest.mark.parametrize("value", [np.array(["text"]), np.zeros(2, np.complex128), "text", [1.0]])
def test_a_tensor_of_an_unknown_kind_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError):
        InlineConnector().send(StageData(modality=Modality.LATENT, tensors={"x": value}))


@pytest.mark.invariant("CONNECTOR-INV-003")
def test_release_and_close_are_idempotent_and_nothing_is_sent_after_close() -> None:
    connector = SharedMemoryConnector(0)
    data = StageData(modality=Modality.LATENT, tensors={"x": np.ones(10, np.uint8)})
    first, _ = connector.send(data)
    second, _ = connector.send(data)
    assert first.handle
    assert first.handle != second.handle
    for _ in range(2):
        connector.release(first.handle)
        connector.release("unknown")
        assert (connector.outstanding(), connector.outstanding_bytes()) == (1, 10)
    connector.close()
    connector.close()
    assert connector.outstanding() == 0
    with pytest.raises(UnavailableError, match="shutting down"):
        connector.send(data)
    assert connector.outstanding() == 0


def tensor_ref(place: Any, dtype: str = "uint8", shape: tuple[int, ...] = (4,)) -> PayloadRef:
    return PayloadRef(modality=Modality.LATENT, tensors={"x": TensorRef(dtype, shape, place)})


@pytest.mark.invariant("CONNECTOR-INV-002")
@pytest.mark.parametrize(
    ("ref", "named"),
    [
        (tensor_ref(InlineFrame(1)), "frame 1; there are 1"),
        (tensor_ref(InlineFrame(-1)), "frame -1"),
        (tensor_ref(InlineFrame(0), shape=(5,)), "needs 5 bytes, got 4"),
        (tensor_ref(InlineFrame(0), dtype="float31"), "float31"),
        (tensor_ref(InlineFrame(0), shape=(-1, -4)), "impossible shape"),
        (tensor_ref(InlineFrame(0), shape=(0, 2**62, 2**62)), "impossible shape"),
        (tensor_ref(InlineFrame(0), shape=(1,) * 40), "impossible shape"),
    ],
)
@pytest.mark.parametrize("connector", CONNECTORS[:2])
def test_a_reference_that_does_not_match_is_named(
    connector: Connector, ref: PayloadRef, named: str
) -> None:
    with pytest.raises(ProtocolError, match=named):
        connector.receive(ref, [memoryview(b"abcd")])


@pytest.mark.invariant("TRANSPORT-INV-002")
@settings(max_examples=300)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3)
)
def test_mutated_references_raise_our_errors_or_give_tensors(
    changes: list[tuple[int, int]],
) -> None:
    connector = SharedMemoryConnector(8)
    tensors = {"a": np.arange(16, dtype=np.uint8), "b": np.arange(4, dtype=np.uint8)}
    ref, frames = connector.send(StageData(modality=Modality.LATENT, tensors=tensors))
    raw = bytearray(msgspec.msgpack.encode(ref))
    for place, value in changes:
        raw[place % len(raw)] = value
    try:
        mutated = msgspec.msgpack.decode(bytes(raw), type=PayloadRef)
        for tensor in connector.receive(mutated, frames).tensors.values():
            assert len(bytes(tensor.buffer)) == tensor.nbytes
    except (msgspec.MsgspecError, UnicodeDecodeError, ProtocolError, StageLostError):
        pass
    finally:
        connector.close()


def test_any_connector_receives_what_another_sent() -> None:
    sender = SharedMemoryConnector(0)
    data = StageData(modality=Modality.LATENT, tensors={"x": np.arange(9, dtype=np.uint8)})
    ref, frames = sender.send(data)
    arrived = InlineConnector().receive(ref, frames)
    assert same_tensor(arrived.tensors["x"], data.tensors["x"])
    sender.close()


def test_the_registry_chooses_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_connector("inline", shm_threshold_bytes=1), InlineConnector)
    assert isinstance(make_connector("auto", shm_threshold_bytes=1), SharedMemoryConnector)
    assert isinstance(make_connector("shm", shm_threshold_bytes=1), SharedMemoryConnector)
    monkeypatch.setattr(registry, "shared_memory_usable", lambda: False)
    assert isinstance(make_connector("auto", shm_threshold_bytes=1), InlineConnector)
    with pytest.raises(ConfigurationError, match="needs Linux"):
        make_connector("shm", shm_threshold_bytes=1)


@pytest.mark.parametrize(
    ("kind", "threshold", "named"), [("rdma", 1, "auto, inline, shm"), ("auto", -1, "-1")]
)
def test_the_registry_refuses_unknown_values(kind: Any, threshold: int, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make_connector(kind, shm_threshold_bytes=threshold)


@pytest.mark.invariant("CONNECTOR-INV-001")
def test_transport_knows_nothing_of_who_routes() -> None:
    imported = set()
    for path in Path(transport.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(".".join((node.module or "").split(".")[:2]))
            elif isinstance(node, ast.Import):
                imported.update(".".join(alias.name.split(".")[:2]) for alias in node.names)
    ours = {name for name in imported if name.startswith("omnistage")}
    assert ours == {"omnistage.contracts", "omnistage.transport"}
    methods = {name for name in vars(Connector) if not name.startswith("_")}
    assert methods == {"send", "receive", "release", "outstanding_bytes", "outstanding", "close"}
    assert list(inspect.signature(Connector.send).parameters) == ["self", "data"]


@pytest.mark.invariant("TRANSPORT-INV-003")
def test_data_passes_through_a_process_without_torch() -> None:
    script = (
        "import sys, numpy as np\n"
        "from tests.transport.samples import Modality, PayloadRef\n"
        "from omnistage.contracts.payloads import StageData\n"
        "from omnistage.transport.registry import make_connector\n"
        "from omnistage.transport import codec, sockets\n"
        "for kind in ('inline', 'auto'):\n"
        "    connector = make_connector(kind, shm_threshold_bytes=8)\n"
        "    ref, frames = connector.send(\n"
        "        StageData(modality=Modality.LATENT, tensors={'x': np.arange(9)}))\n"
        "    assert connector.receive(ref, frames).tensors['x'].numpy().sum() == 36\n"
        "    connector.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
