"""What all host weights have in common: blocks whose pieces lie in mapped memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omnistage.memory.host.mapping import HostMemory
from omnistage.memory.host.page_lock import PageLocks, PageRange, pages_of
from omnistage.memory.offload.host import HostBacking, HostBlock

if TYPE_CHECKING:
    from omnistage.platforms.base import Platform


class MemoryWeights:
    """See `HostWeights`. Every piece lies in one of `memories`, which are closed with this."""

    def __init__(
        self,
        backing: HostBacking,
        blocks: Mapping[str, HostBlock],
        memories: Sequence[HostMemory],
    ) -> None:
        self.backing = backing
        self.blocks = blocks
        self.memories = tuple(memories)
        self._locks: PageLocks | None = None

    @property
    def is_page_locked(self) -> bool:
        return self._locks is not None

    @property
    def locked_bytes(self) -> int:
        """Whole pages; 0 when not locked."""
        return self._locks.locked_bytes if self._locks is not None else 0

    def page_lock(self, platform: Platform, device: str, limit_bytes: int | None) -> bool:
        assert not any(memory.is_closed for memory in self.memories), "closed"
        if self._locks is None:
            self._locks = PageLocks.acquire(self._ranges(), platform, device, limit_bytes)
        return self._locks is not None

    def check(self, path: str) -> None:
        """Nothing is known to be wrong with these bytes."""

    def close(self) -> None:
        """After a failure to unlock, the memory concerned stays mapped, all else is closed."""
        locks, self._locks = self._locks, None
        try:
            if locks is not None:
                locks.release()
        finally:
            self.blocks = {}
            for memory in self.memories:
                memory.close()

    def _ranges(self) -> list[PageRange]:
        pieces = [piece.source for block in self.blocks.values() for piece in block.pieces]
        ranges: list[PageRange] = []
        for memory in self.memories:
            end = memory.address + memory.nbytes
            inside = [one for one in pieces if memory.address <= one.data_ptr() < end]
            ranges += pages_of(memory, inside)
        return ranges
