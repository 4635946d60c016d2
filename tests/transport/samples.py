"""Messages and data that the transport tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.messages import Message, Output, Submit
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import InlineFrame, PayloadRef, SharedSegment, TensorRef
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.contracts.tensors import ITEM_BYTES, HostTensor, host_tensor

IDENTITY = RequestIdentity(request_id="req-1", child_index=2, role="main", priority=3)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
fields = st.dictionaries(st.text(max_size=6), values, max_size=4)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def host_tensors(draw: st.DrawFn) -> HostTensor:
    """Any dtype, any small shape: empty and zero-dimensional ones too."""
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = draw(shapes)
    nbytes = int(np.prod(shape, dtype=int)) * ITEM_BYTES[dtype]
    return HostTensor(dtype, shape, memoryview(draw(st.binary(min_size=nbytes, max_size=nbytes))))


def same_tensor(left: Any, right: Any) -> bool:
    """Equal in dtype, shape and every byte (NaN and signed zero included)."""
    a, b = host_tensor(left), host_tensor(right)
    return (a.dtype, a.shape, bytes(a.buffer)) == (b.dtype, b.shape, bytes(b.buffer))


def submit(**changes: Any) -> Submit:
    """A message that uses most kinds of values the protocol has."""
    payload = PayloadRef(
        modality=Modality.TEXT,
        fields={"prompt": "a cat", "ids": [1, 2], "blob": b"\x00\xff", "nested": {"x": [None]}},
        tensors={
            "small": TensorRef("float32", (2, 2), InlineFrame(0)),
            "large": TensorRef("bfloat16", (3,), SharedSegment(7, 8, "token", 64)),
        },
        handle="h",
        nbytes=22,
    )
    base: dict[str, Any] = {
        "stage_id": 1,
        "replica_id": 0,
        "identity": IDENTITY,
        "source_stage_id": None,
        "sequence": 0,
        "payload": payload,
        "params": OmniDiffusionSamplingParams(seed=1, height=64),
        "input_complete": True,
        "credits": 4,
    }
    return Submit(**{**base, **changes})


def output(fields: dict[str, Any]) -> Message:
    payload = PayloadRef(modality=Modality.IMAGE, fields=fields)
    return Output(identity=IDENTITY, sequence=0, payload=payload, final=True)
