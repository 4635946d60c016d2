"""Large tensors by shared memory: one sealed, anonymous segment a payload; the rest inline."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

from omnistage.contracts.errors import UnavailableError
from omnistage.contracts.payloads import (
    InlineFrame,
    PayloadRef,
    SharedSegment,
    StageData,
    TensorRef,
)
from omnistage.contracts.tensors import HostTensor, host_tensor, total_bytes
from omnistage.transport.codec import flat_bytes_view
from omnistage.transport.fields import plain_fields
from omnistage.transport.receiving import receive_payload
from omnistage.transport.segments import aligned, host_limits, write_segment


class SharedMemoryConnector:
    """See `Connector`. Tensors of at least `threshold_bytes` go into the payload's segment, whose
    token is the payload's handle; smaller and empty ones travel inline."""

    def __init__(self, threshold_bytes: int) -> None:
        self._threshold_bytes = max(1, threshold_bytes)
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, int]] = {}
        self._closed = False

    def send(self, data: StageData) -> tuple[PayloadRef, list[memoryview]]:
        tensors = {name: host_tensor(value) for name, value in data.tensors.items()}
        fields = plain_fields(data.fields)
        large = {n: t for n, t in tensors.items() if t.nbytes >= self._threshold_bytes}
        small = {n: t for n, t in tensors.items() if n not in large}
        handle, segments = self._share(large) if large else (None, {})
        frames = {name: InlineFrame(index) for index, name in enumerate(small)}
        places: dict[str, InlineFrame | SharedSegment] = {**frames, **segments}
        ref = PayloadRef(
            modality=data.modality,
            fields=fields,
            tensors={n: TensorRef(t.dtype, t.shape, places[n]) for n, t in tensors.items()},
            handle=handle,
            nbytes=total_bytes(list(tensors.values())),
        )
        return ref, [flat_bytes_view(tensor.buffer) for tensor in small.values()]

    def _share(self, tensors: dict[str, HostTensor]) -> tuple[str, dict[str, SharedSegment]]:
        offsets_bytes, size_bytes = _layout(tensors.values())
        with host_limits():
            buffers = [flat_bytes_view(tensor.buffer) for tensor in tensors.values()]
            fd, token = write_segment(buffers, offsets_bytes, size_bytes)
        with self._lock:
            if self._closed:
                os.close(fd)
                raise UnavailableError("this stage is shutting down and sends nothing any more")
            self._held[token] = (fd, size_bytes)
        pid = os.getpid()
        places = [SharedSegment(pid, fd, token, offset) for offset in offsets_bytes]
        return token, dict(zip(tensors, places, strict=True))

    def receive(self, ref: PayloadRef, frames: Sequence[memoryview]) -> StageData:
        return receive_payload(ref, frames)

    def release(self, handle: str) -> None:
        with self._lock:
            held = self._held.pop(handle, None)
        if held is not None:
            os.close(held[0])

    def outstanding_bytes(self) -> int:
        with self._lock:
            return sum(size_bytes for _, size_bytes in self._held.values())

    def outstanding(self) -> int:
        with self._lock:
            return len(self._held)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            handles = list(self._held)
        for handle in handles:
            self.release(handle)


def _layout(tensors: Iterable[HostTensor]) -> tuple[list[int], int]:
    """The aligned offset of each tensor, and the size of all."""
    offsets_bytes: list[int] = []
    end_bytes = 0
    for tensor in tensors:
        offsets_bytes.append(aligned(end_bytes))
        end_bytes = offsets_bytes[-1] + tensor.nbytes
    return offsets_bytes, end_bytes
