"""One rank's share of streamed weights: of each block's image, one of several equal parts.

The image of a shared block is as long as all parts together, a little longer than the block's own.
Its pieces are this rank's only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from omnistage.memory.host.layout import fill, shard_bytes, shard_of
from omnistage.memory.host.mapping import AnonymousMemory, HostMemory
from omnistage.memory.host.private import REGION_BYTES
from omnistage.memory.host.weights import MemoryWeights
from omnistage.memory.offload.host import HostBacking, HostBlock, HostPiece, HostWeights

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import Platform


class SharedWeights(MemoryWeights):
    """`is_packed`: the share is a copy of its own and `whole` is not needed any more, see
    `release_whole`; else it lies in the mapped files of `whole`, which stay open."""

    def __init__(
        self,
        whole: HostWeights,
        blocks: dict[str, HostBlock],
        memories: Sequence[HostMemory],
        *,
        is_packed: bool,
    ) -> None:
        super().__init__(HostBacking.PRIVATE if is_packed else whole.backing, blocks, memories)
        self.is_packed = is_packed
        self._whole: HostWeights | None = whole

    @classmethod
    def take(
        cls, whole: HostWeights, paths: Sequence[str], index: int, count: int
    ) -> SharedWeights:
        """Part `index` of `count`. Of mapped files, pages are shared with all ranks anyway and only
        those of the part are page-locked; of anything else the part is copied.

        Raises `CheckpointError` when bytes that are copied are known to be wrong.
        """
        blocks = {path: whole.blocks[path] for path in paths}
        if whole.backing is not HostBacking.PRIVATE and isinstance(whole, MemoryWeights):
            mapped = {
                path: _shared(block, shard_of(block, index, count), index, count)
                for path, block in blocks.items()
            }
            return cls(whole, mapped, whole.memories, is_packed=False)
        packer = _SharePacker(index, count, sum(shard_bytes(one, count) for one in blocks.values()))
        for path, block in blocks.items():
            whole.check(path)
            packer.add(block)
        return cls(whole, packer.blocks, packer.regions, is_packed=True)

    @property
    def is_page_locked(self) -> bool:
        in_whole = self._whole is not None and not self.is_packed and self._whole.is_page_locked
        return in_whole or super().is_page_locked

    def page_lock(self, platform: Platform, device: str, limit_bytes: int | None) -> bool:
        return self.is_page_locked or super().page_lock(platform, device, limit_bytes)

    def check(self, path: str) -> None:
        if not self.is_packed and self._whole is not None:
            self._whole.check(path)

    def release_whole(self) -> None:
        """Of a packed share: nobody needs the whole blocks any more."""
        if self.is_packed and self._whole is not None:
            self._whole.close()
            self._whole = None

    def close(self) -> None:
        try:
            if self._locks is not None:
                self._locks.release()
        finally:
            self._locks = None
            if self.is_packed:
                super().close()
            self.blocks = {}


class _SharePacker:
    def __init__(self, index: int, count: int, expected_bytes: int) -> None:
        self.blocks: dict[str, HostBlock] = {}
        self.regions: list[AnonymousMemory] = []
        self._index = index
        self._count = count
        self._expected_bytes = expected_bytes
        self._used_bytes = 0

    def add(self, block: HostBlock) -> None:
        part = self._take(shard_bytes(block, self._count))
        fill(part, shard_of(block, self._index, self._count))
        pieces = [HostPiece(source=part, offset_bytes=0)] if part.numel() else []
        self.blocks[block.path] = _shared(block, pieces, self._index, self._count)

    def _take(self, nbytes: int) -> torch.Tensor:
        if not self.regions or self._used_bytes + nbytes > self.regions[-1].nbytes:
            region_bytes = max(nbytes, min(REGION_BYTES, self._expected_bytes), 1)
            self.regions.append(AnonymousMemory(region_bytes))
            self._used_bytes = 0
        part = self.regions[-1].bytes[self._used_bytes : self._used_bytes + nbytes]
        self._used_bytes += nbytes
        self._expected_bytes -= nbytes
        return part


def _shared(block: HostBlock, pieces: Sequence[HostPiece], index: int, count: int) -> HostBlock:
    part_bytes = shard_bytes(block, count)
    moved = tuple(
        replace(piece, offset_bytes=index * part_bytes + piece.offset_bytes) for piece in pieces
    )
    return replace(block, nbytes=count * part_bytes, pieces=moved)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same shape and dtype without memory of its own. What reads it finds NaN;
    who writes to it gets torch's error."""
    import torch

    item = torch.full((tensor.element_size(),), 0xFF, dtype=torch.uint8).view(tensor.dtype)
    return item[0].expand(tensor.shape)
