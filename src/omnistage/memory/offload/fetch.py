"""How a block's bytes get from the host into a device slot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from omnistage.memory.offload.host import HostBlock, HostWeights

if TYPE_CHECKING:
    import torch

    from omnistage.memory.host.mapping import AnonymousMemory
    from omnistage.memory.host.page_lock import PageLocks
    from omnistage.platforms.base import Event, Platform

logger = logging.getLogger(__name__)


class Staging(StrEnum):
    """Of pieces that are not page-locked."""

    NOT_NEEDED = "not needed"
    IN_USE = "in use"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Transfer:
    """One block into one slot, prepared. `start` starts it on the current stream. With
    `occupies_host` that takes as long as the host needs to copy the block itself, so it is not
    started in front of a block's own work."""

    start: Callable[[], None]
    occupies_host: bool = False


class BlockFetcher(Protocol):
    """Knows nothing of slots' order. The ring calls `prepare` before the first pass, once for
    every block and slot, and starts transfers on its copy stream, one after the other."""

    def prepare(self, weights: HostWeights, block: HostBlock, image: torch.Tensor) -> Transfer:
        """`image` is the slot's part for this block: 1-D uint8 on the device, `block.nbytes`."""

    @property
    def staging(self) -> Staging:
        """What became of it for all that was prepared."""

    def close(self) -> None:
        """No transfer is under way. Idempotent."""


class LocalFetcher:
    """Copies the pieces: straight from page-locked memory, else through two page-locked buffers of
    `staging_bytes`, one of which is filled while the device reads the other. Where the platform
    refuses to lock these as well, it copies from the pieces as they are."""

    def __init__(self, platform: Platform, device: str, staging_bytes: int) -> None:
        self._platform = platform
        self._device = device
        self._staging_bytes = staging_bytes
        self._staging: _Staging | None = None
        self._staging_refused = False

    def prepare(self, weights: HostWeights, block: HostBlock, image: torch.Tensor) -> Transfer:
        if not weights.is_page_locked and (staging := self._staging_buffers()) is not None:
            return Transfer(start=_staged(staging, block, image), occupies_host=True)
        parts = [
            (image[piece.offset_bytes : piece.offset_bytes + piece.source.numel()], piece.source)
            for piece in block.pieces
        ]
        upload = self._platform.upload

        def start() -> None:
            for destination, source in parts:
                upload(destination, source)

        return Transfer(start=start, occupies_host=not weights.is_page_locked)

    @property
    def staging(self) -> Staging:
        if self._staging_refused:
            return Staging.REFUSED
        return Staging.NOT_NEEDED if self._staging is None else Staging.IN_USE

    def close(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def _staging_buffers(self) -> _Staging | None:
        if self._staging is None and not self._staging_refused and self._staging_bytes:
            self._staging = _Staging.take(self._platform, self._device, self._staging_bytes)
            self._staging_refused = self._staging is None
            if self._staging_refused:
                logger.warning(
                    "page-locked buffers of 2 x %d bytes were refused on %s: weights that are not "
                    "page-locked are copied as they are, much below the link's rate; raise the "
                    "limit of locked memory (ulimit -l) or keep more blocks resident",
                    self._staging_bytes,
                    self._device,
                )
        return self._staging


class _Staging:
    """Two buffers in one page-locked range. A buffer's event says when the device has read it."""

    def __init__(
        self, platform: Platform, device: str, memory: AnonymousMemory, locks: PageLocks
    ) -> None:
        half_bytes = memory.nbytes // 2
        self.platform = platform
        self.buffers = (memory.bytes[:half_bytes], memory.bytes[half_bytes:])
        self.events: tuple[Event, Event] = (platform.event(device), platform.event(device))
        self._memory = memory
        self._locks = locks
        self._turn = 0

    @classmethod
    def take(cls, platform: Platform, device: str, staging_bytes: int) -> _Staging | None:
        from omnistage.memory.host.mapping import PAGE_BYTES, AnonymousMemory
        from omnistage.memory.host.page_lock import PageLocks, pages_of
        from omnistage.memory.offload.host import aligned

        memory = AnonymousMemory(2 * aligned(staging_bytes, PAGE_BYTES))
        ranges = pages_of(memory, [memory.bytes])
        locks = PageLocks.acquire(ranges, platform, device, None)
        if locks is None:
            memory.close()
            return None
        return cls(platform, device, memory, locks)

    def next(self) -> int:
        """The buffer whose turn it is, once the device has read what it held."""
        self._turn ^= 1
        self.events[self._turn].synchronize()
        return self._turn

    def close(self) -> None:
        self.buffers = ()  # type: ignore[assignment]
        try:
            self._locks.release()
        finally:
            self._memory.close()


def _staged(staging: _Staging, block: HostBlock, image: torch.Tensor) -> Callable[[], None]:
    nbytes = image.numel()
    filled = [
        [
            (buffer[piece.offset_bytes : piece.offset_bytes + piece.source.numel()], piece.source)
            for piece in block.pieces
        ]
        for buffer in staging.buffers
    ]
    buffers = [buffer[:nbytes] for buffer in staging.buffers]

    def start() -> None:
        turn = staging.next()
        for destination, source in filled[turn]:
            destination.copy_(source)
        staging.platform.upload(image, buffers[turn])
        staging.events[turn].record()

    return start
