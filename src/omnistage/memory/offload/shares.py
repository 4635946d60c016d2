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
from omnistage.memory.host.modules import layout_of, streamed_tensors
from omnistage.memory.host.private import REGION_BYTES
from omnistage.memory.host.weights import MemoryWeights
from omnistage.memory.offload.host import HostBacking, HostBlock, HostPiece, HostWeights
from omnistage.memory.offload.sharding import Share

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import Platform


class SharedWeights(MemoryWeights):
    """`is_packed`: the share is a copy of its own and `whole` is not needed any more, see
    `release_whole`; else it lies in the mapped files of `whole`, which stay open."""

    def __init__(
        self,
        share: Share,
        blocks: dict[str, HostBlock],
        memories: Sequence[HostMemory],
        *,
        whole: HostWeights | None,
        is_packed: bool,
    ) -> None:
        backing = HostBacking.PRIVATE if whole is None or is_packed else whole.backing
        super().__init__(backing, blocks, memories)
        self.share = share
        self.is_packed = is_packed
        self._whole = whole

    @classmethod
    def take(cls, whole: HostWeights, paths: Sequence[str], share: Share) -> SharedWeights:
        """Of mapped files, pages are shared with all ranks anyway and only those of the share are
        page-locked; of anything else the share is copied.

        Raises `CheckpointError` when bytes that are copied are known to be wrong.
        """
        blocks = {path: whole.blocks[path] for path in paths}
        if whole.backing is not HostBacking.PRIVATE and isinstance(whole, MemoryWeights):
            mapped = {
                path: _shared(block, shard_of(block, share.index, share.count), share)
                for path, block in blocks.items()
            }
            return cls(share, mapped, whole.memories, whole=whole, is_packed=False)
        packer = SharePacker(share, sum(one.nbytes for one in blocks.values()))
        for path, block in blocks.items():
            whole.check(path)
            packer.add_block(block)
        return packer.finish(whole)

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


class SharePacker:
    """Packs the share of block after block, as `BlockPacker` does whole ones. `expected_bytes` is a
    guess of all whole blocks."""

    def __init__(self, share: Share, expected_bytes: int) -> None:
        self._share = share
        self._blocks: dict[str, HostBlock] = {}
        self._regions: list[AnonymousMemory] = []
        self._expected_bytes = expected_bytes // share.count
        self._used_bytes = 0

    def add(self, module: torch.nn.Module, path: str) -> None:
        """Copy the share of a block of `module`, whose tensors become stand-ins."""
        layout, tensors = layout_of(module, path), streamed_tensors(module, path)
        pieces = [
            HostPiece(source=_bytes_of(tensors[one.name]), offset_bytes=one.offset_bytes)
            for one in layout.places
        ]
        self.add_block(
            HostBlock(path=path, nbytes=layout.nbytes, places=layout.places, pieces=tuple(pieces))
        )
        for tensor in tensors.values():
            tensor.data = stand_in(tensor)

    def add_block(self, block: HostBlock) -> None:
        part = self._take(shard_bytes(block, self._share.count))
        fill(part, shard_of(block, self._share.index, self._share.count))
        pieces = [HostPiece(source=part, offset_bytes=0)] if part.numel() else []
        self._blocks[block.path] = _shared(block, pieces, self._share)

    def finish(self, whole: HostWeights | None = None) -> SharedWeights:
        return SharedWeights(self._share, self._blocks, self._regions, whole=whole, is_packed=True)

    def close(self) -> None:
        """Instead of `finish`."""
        for region in self._regions:
            region.close()

    def _take(self, nbytes: int) -> torch.Tensor:
        if not self._regions or self._used_bytes + nbytes > self._regions[-1].nbytes:
            region_bytes = max(nbytes, min(REGION_BYTES, self._expected_bytes), 1)
            self._regions.append(AnonymousMemory(region_bytes))
            self._used_bytes = 0
        part = self._regions[-1].bytes[self._used_bytes : self._used_bytes + nbytes]
        self._used_bytes += nbytes
        self._expected_bytes -= nbytes
        return part


def _shared(block: HostBlock, pieces: Sequence[HostPiece], share: Share) -> HostBlock:
    part_bytes = shard_bytes(block, share.count)
    start_bytes = share.index * part_bytes
    moved = tuple(replace(piece, offset_bytes=start_bytes + piece.offset_bytes) for piece in pieces)
    return replace(block, nbytes=share.count * part_bytes, pieces=moved)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same shape and dtype without memory of its own. What reads it finds NaN;
    who writes to it gets torch's error."""
    import torch

    item = torch.full((tensor.element_size(),), 0xFF, dtype=torch.uint8).view(tensor.dtype)
    return item[0].expand(tensor.shape)
