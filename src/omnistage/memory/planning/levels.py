"""How much of a part of a pipeline is resident, and which blocks: from none to all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from omnistage.memory.offload.residency import interleaved_residents, leading_residents
from omnistage.memory.planning.sizes import ComponentSize
from omnistage.memory.planning.work import ComponentWork

MAX_LEVELS = 64


def levels(
    sizes: Sequence[ComponentSize],
    work: Mapping[str, ComponentWork],
    resident_layers: int | None = None,
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Residents by component, from none to all; equal shares of all components of a part. Blocks
    that a request does not use come last. With `resident_layers` the leading ones, in one way."""
    if resident_layers is not None:
        yield {one.component: leading_residents(len(one.blocks), resident_layers) for one in sizes}
        return
    used = {one.component: used_blocks(one, work[one.component]) for one in sizes}
    count = min(MAX_LEVELS, max((len(indices) for indices in used.values()), default=0))
    for level in range(count + 1):
        yield {one.component: _share(one, used[one.component], level, count) for one in sizes}
    if any(len(used[one.component]) < len(one.blocks) for one in sizes):
        yield {one.component: tuple(range(len(one.blocks))) for one in sizes}


def used_blocks(size: ComponentSize, work: ComponentWork) -> tuple[int, ...]:
    """Indices of blocks that run. A vision tower does nothing for a request without pictures."""
    if not work.is_known:
        return tuple(range(len(size.blocks)))
    return tuple(index for index, block in enumerate(size.blocks) if block.path in work.block_s)


def _share(size: ComponentSize, used: tuple[int, ...], level: int, count: int) -> tuple[int, ...]:
    images = tuple(size.blocks[index].image_bytes for index in used)
    return tuple(used[position] for position in _interleaved(images, level, count))


@lru_cache(maxsize=4096)
def _interleaved(sizes_bytes: tuple[int, ...], level: int, count: int) -> tuple[int, ...]:
    if not sizes_bytes:
        return ()
    return interleaved_residents(sizes_bytes, -(-sum(sizes_bytes) * level // count))
