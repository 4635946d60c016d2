"""Streamed blocks in memory of this process: for bytes that no file holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.host.layout import view
from omnistage.memory.host.mapping import AnonymousMemory
from omnistage.memory.host.modules import layout_of, streamed_tensors
from omnistage.memory.host.weights import MemoryWeights
from omnistage.memory.offload.host import HostBacking, HostBlock, HostPiece, aligned

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import Platform

REGION_BYTES = 8 * 2**30
"""Bound of one mapping, unless a block is larger: what is page-locked with one call."""


class PrivateWeights(MemoryWeights):
    """Filled by a `BlockPacker`."""

    @classmethod
    def pack(
        cls,
        module: torch.nn.Module,
        paths: Sequence[str],
        platform: Platform | None = None,
        device: str | None = None,
        limit_bytes: int | None = None,
    ) -> PrivateWeights:
        """Move blocks of a loaded module here and leave views in their place; then page-lock, where
        a platform is given and does so.

        A block's old memory is free once it is packed, if nobody else holds it. Raises
        `UnsupportedCombinationError`, with nothing moved, when a block shares a tensor with the
        rest of the module.
        """
        _check_unshared(module, paths)
        packer = BlockPacker(sum(layout_of(module, path).nbytes for path in paths))
        for path in paths:
            packer.add(module, path)
        weights = packer.finish()
        if platform is not None:
            assert device is not None
            weights.page_lock(platform, device, limit_bytes)
        return weights


class BlockPacker:
    """Packs block after block while a module is loaded. `expected_bytes` is a guess of the whole:
    only pages that are written take memory."""

    def __init__(self, expected_bytes: int, region_bytes: int = REGION_BYTES) -> None:
        self._expected_bytes = expected_bytes
        self._region_bytes = region_bytes
        self._regions: list[AnonymousMemory] = []
        self._used_bytes = 0
        self._blocks: dict[str, HostBlock] = {}

    def add(self, module: torch.nn.Module, path: str) -> None:
        """Copy the block's tensors, wherever they are, and make its parameters and buffers, which
        stay the same objects, views of the copy."""
        layout = layout_of(module, path)
        image = self._take(layout.nbytes)
        tensors = streamed_tensors(module, path)
        for place in layout.places:
            packed = view(image, place)
            packed.copy_(tensors[place.name].detach())
            tensors[place.name].data = packed
        pieces = (HostPiece(source=image, offset_bytes=0),) if layout.nbytes else ()
        self._blocks[path] = HostBlock(
            path=path, nbytes=layout.nbytes, places=layout.places, pieces=pieces
        )

    def finish(self) -> PrivateWeights:
        return PrivateWeights(HostBacking.PRIVATE, self._blocks, self._regions)

    def close(self) -> None:
        """Instead of `finish`."""
        for region in self._regions:
            region.close()

    def _take(self, nbytes: int) -> torch.Tensor:
        if not self._regions or self._used_bytes + nbytes > self._regions[-1].nbytes:
            wanted_bytes = min(self._region_bytes, aligned(self._expected_bytes))
            self._regions.append(AnonymousMemory(max(nbytes, wanted_bytes, 1)))
            self._used_bytes = 0
        image = self._regions[-1].bytes[self._used_bytes : self._used_bytes + nbytes]
        self._used_bytes += nbytes
        self._expected_bytes -= nbytes
        return image


def _check_unshared(module: torch.nn.Module, paths: Sequence[str]) -> None:
    owners: dict[int, str] = {}
    for path in paths:
        for name, tensor in streamed_tensors(module, path).items():
            if owners.setdefault(id(tensor), path) != path:
                raise UnsupportedCombinationError(_shared_words(name, path, owners[id(tensor)]))
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        owner = owners.get(id(tensor))
        if owner is not None and not name.startswith(f"{owner}."):
            raise UnsupportedCombinationError(_shared_words(name, "another module", owner))


def _shared_words(name: str, first: str, second: str) -> str:
    return (
        f"{name} of {first} is a tensor of block {second} too, so that block cannot be streamed; "
        "keep the component resident (offload none), or swap whole components (offload model)"
    )
