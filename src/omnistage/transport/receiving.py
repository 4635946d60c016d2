"""The consumer's half, common to all connectors: from a reference and frames to tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from omnistage.contracts.errors import ProtocolError
from omnistage.contracts.payloads import InlineFrame, PayloadRef, StageData, TensorRef
from omnistage.contracts.tensors import ITEM_BYTES, HostTensor
from omnistage.transport.codec import flat_bytes_view
from omnistage.transport.segments import SegmentReader

MAX_DIMENSIONS = 32
"""numpy 1.26 has no more."""


def receive_payload(ref: PayloadRef, frames: Sequence[memoryview]) -> StageData:
    """See `Connector.receive`. Segments are mapped once for all tensors of the payload."""
    reader = SegmentReader()
    tensors = {name: _tensor(name, tensor, frames, reader) for name, tensor in ref.tensors.items()}
    return StageData(modality=ref.modality, fields=ref.fields, tensors=tensors)


def _tensor(
    name: str, ref: TensorRef, frames: Sequence[memoryview], reader: SegmentReader
) -> HostTensor:
    nbytes = _checked_bytes(name, ref)
    if not isinstance(ref.place, InlineFrame):
        return HostTensor(ref.dtype, ref.shape, reader.read(ref.place, nbytes))
    if not 0 <= ref.place.index < len(frames):
        raise ProtocolError(
            f"tensor {name!r} points to frame {ref.place.index}; there are {len(frames)}"
        )
    return HostTensor(ref.dtype, ref.shape, _private(frames[ref.place.index]))


def _checked_bytes(name: str, ref: TensorRef) -> int:
    if ref.dtype not in ITEM_BYTES:
        raise ProtocolError(f"tensor {name!r} has the unknown dtype {ref.dtype!r}")
    sides = math.prod(side for side in ref.shape if side) * ITEM_BYTES[ref.dtype]
    if len(ref.shape) > MAX_DIMENSIONS or min(ref.shape, default=0) < 0 or sides >= 2**63:
        raise ProtocolError(f"tensor {name!r} has the impossible shape {ref.shape}")
    return 0 if 0 in ref.shape else sides


def _private(frame: memoryview) -> memoryview:
    """Received `bytes` belong to nobody else; anything else may change under us."""
    view = flat_bytes_view(frame)
    return view if isinstance(view.obj, bytes) else memoryview(bytes(view))
