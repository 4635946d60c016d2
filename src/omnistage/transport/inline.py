"""All bytes travel behind the message. Works everywhere and holds nothing."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.contracts.payloads import InlineFrame, PayloadRef, StageData, TensorRef
from omnistage.contracts.tensors import host_tensor, total_bytes
from omnistage.transport.codec import flat_bytes_view
from omnistage.transport.fields import plain_fields
from omnistage.transport.receiving import receive_payload


class InlineConnector:
    """See `Connector`. Handles are always None, so there is nothing to release."""

    def send(self, data: StageData) -> tuple[PayloadRef, list[memoryview]]:
        tensors = {name: host_tensor(value) for name, value in data.tensors.items()}
        refs = {
            name: TensorRef(tensor.dtype, tensor.shape, InlineFrame(index))
            for index, (name, tensor) in enumerate(tensors.items())
        }
        ref = PayloadRef(
            modality=data.modality,
            fields=plain_fields(data.fields),
            tensors=refs,
            nbytes=total_bytes(list(tensors.values())),
        )
        return ref, [flat_bytes_view(tensor.buffer) for tensor in tensors.values()]

    def receive(self, ref: PayloadRef, frames: Sequence[memoryview]) -> StageData:
        return receive_payload(ref, frames)

    def release(self, handle: str) -> None:
        pass

    def outstanding_bytes(self) -> int:
        return 0

    def outstanding(self) -> int:
        return 0

    def close(self) -> None:
        pass
