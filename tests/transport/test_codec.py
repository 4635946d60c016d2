from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.contracts import messages
from omnistage.contracts.errors import InvalidRequestError, ProtocolError
from omnistage.contracts.messages import PROTOCOL_VERSION, Drain, FromReplica, Hello, ToReplica
from omnistage.transport.codec import MessageDecoder, encode
from tests.transport.samples import fields, output, submit

TO_REPLICA = MessageDecoder(ToReplica)
FROM_REPLICA = MessageDecoder(FromReplica)


def raw_frame(body: Any, version: int = PROTOCOL_VERSION) -> bytes:
    return bytes([version]) + msgspec.msgpack.encode(body)


@pytest.mark.invariant("TRANSPORT-INV-001")
def test_a_message_and_its_buffers_survive() -> None:
    buffers = [b"abc", memoryview(np.arange(6, dtype=np.float32).reshape(2, 3)), b""]
    message, received = TO_REPLICA.decode(encode(submit(), buffers))
    assert message == submit()
    assert [bytes(view) for view in received] == [bytes(buffer) for buffer in buffers]
    assert all(view.ndim == 1 and view.format == "B" for view in received)


@pytest.mark.invariant("TRANSPORT-INV-001")
@given(content=fields)
def test_any_plain_fields_survive(content: dict[str, Any]) -> None:
    message, _ = FROM_REPLICA.decode(encode(output(content)))
    assert message == output(content)


def test_every_message_of_the_contract_round_trips_by_its_own_tag() -> None:
    for name in ("ToReplica", "FromReplica", "ToRank", "FromRank"):
        union = getattr(messages, name)
        tags = [kind.__struct_config__.tag for kind in union.__args__]
        assert len(tags) == len(set(tags)), f"{name} has two messages of one tag"
        MessageDecoder(union)


def body_of(message: Any, **changes: Any) -> dict[str, Any]:
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return {**body, **changes}


@pytest.mark.invariant("TRANSPORT-INV-001")
@pytest.mark.parametrize(
    ("frames", "named"),
    [
        ([], "without frames"),
        ([b""], "empty"),
        ([raw_frame(body_of(Drain()), version=9)], "version 9"),
        ([raw_frame({"kind": "teleport"})], "teleport"),
        ([raw_frame(body_of(Hello(token="t", pid=1)))], "hello"),
        ([raw_frame({"stage_id": 0})], "kind"),
        ([raw_frame(body_of(Drain(), colour="red"))], "colour"),
        ([raw_frame(body_of(Drain(), stage_id="one"))], "stage_id"),
        ([raw_frame(body_of(submit(), payload={"modality": "smell"}))], "smell"),
        ([raw_frame([1, 2])], "array"),
        ([bytes([PROTOCOL_VERSION])], "truncated"),
        ([bytes([PROTOCOL_VERSION]) + b"\xc1"], "malformed"),
        ([raw_frame(body_of(Drain())) + b"\x00"], "trailing"),
    ],
)
def test_what_is_malformed_is_named(frames: list[bytes], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        TO_REPLICA.decode(frames)


def test_an_extension_type_is_refused() -> None:
    body = body_of(output({}))
    body["payload"]["fields"]["x"] = msgspec.msgpack.Ext(5, b"code")
    with pytest.raises(ProtocolError, match="extension type 5"):
        FROM_REPLICA.decode([raw_frame(body)])


def test_endless_nesting_is_refused() -> None:
    bomb = b"\x91" * 100_000 + b"\xc0"
    head = encode(output({"x": 0}))[0]
    assert bytes(head).count(b"\xa1x\x00") == 1
    with pytest.raises(ProtocolError, match="recursion"):
        FROM_REPLICA.decode([bytes(head).replace(b"\xa1x\x00", b"\xa1x" + bomb)])


@pytest.mark.parametrize("value", [object(), np.zeros(2), 2**70, {"x": np.float32(1)}, 1j])
def test_what_msgpack_cannot_carry_is_refused_before_it_is_sent(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="Output cannot be sent"):
        encode(output({"x": value}))


@pytest.mark.invariant("TRANSPORT-INV-002")
@settings(max_examples=400)
@given(data=st.data())
def test_mutated_frames_raise_protocol_errors_or_decode(data: st.DataObject) -> None:
    head = bytearray(encode(submit())[0])
    for _ in range(data.draw(st.integers(1, 4))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(head[: data.draw(st.integers(0, len(head)))]))
    decode_or_refuse(bytes(head))


@given(noise=st.binary(max_size=64))
def test_noise_raises_protocol_errors(noise: bytes) -> None:
    decode_or_refuse(noise)
    decode_or_refuse(bytes([PROTOCOL_VERSION]) + noise)


def decode_or_refuse(head: bytes) -> None:
    try:
        message, _ = TO_REPLICA.decode([head])
    except ProtocolError:
        return
    assert isinstance(message, messages.Message)


def test_every_truncation_is_refused() -> None:
    head = bytes(encode(submit())[0])
    for end in range(len(head)):
        with pytest.raises(ProtocolError):
            TO_REPLICA.decode([head[:end]])
