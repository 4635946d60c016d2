"""What moves `StageData` between processes: it carries and never routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omnistage.contracts.payloads import PayloadRef, StageData


class Connector(Protocol):
    """One process's end. Any connector receives what any connector of this host has sent.

    All methods may be called from several threads.
    """

    def send(self, data: StageData) -> tuple[PayloadRef, list[memoryview]]:
        """Describe `data` and return the frames that must travel behind the message.

        Tensors may be numpy arrays, torch tensors of any device, or `HostTensor`s. The frames are
        views: send them before the tensors change. When `ref.handle` is set, the bytes stay held
        until `release(handle)`.

        Raises `InvalidRequestError` for a value that cannot travel, `OutOfMemoryError` or
        `UnavailableError` when the host has no memory or descriptors left.
        """

    def receive(self, ref: PayloadRef, frames: Sequence[memoryview]) -> StageData:
        """The data, its tensors as `HostTensor`s that outlive the producer's `release`.

        Raises `ProtocolError` when reference and bytes do not match, `StageLostError` when the
        producer died, `UnavailableError` when this process is out of descriptors.
        """

    def release(self, handle: str) -> None:
        """Free what is held for a sent payload. Unknown and released handles are ignored."""

    def outstanding_bytes(self) -> int:
        """Bytes sent and not yet released."""

    def outstanding(self) -> int:
        """Payloads sent and not yet released."""

    def close(self) -> None:
        """Release everything. Idempotent; `send` fails afterwards, `receive` goes on working."""
