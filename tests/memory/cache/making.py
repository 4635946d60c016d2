"""Small blocks for the store, and what a store must give back of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from omnistage.memory.cache.store import WeightStore
from omnistage.memory.cache.weights import CachedWeights
from omnistage.memory.cache.writer import EntryFacts
from omnistage.memory.host.layout import BlockLayout, host_views, image_layout
from omnistage.memory.offload.host import HostBlock, HostPiece

KEY = "a" * 64
OTHER_KEY = "b" * 64
TENSORS = {
    "weight": ((40, 50), "bfloat16"),
    "scale": ((40, 1), "float32"),
    "packed": ((33,), "float8_e4m3fn"),
    "step": ((), "int64"),
    "nothing": ((0, 4), "float16"),
}


def facts(key: str = KEY) -> EntryFacts:
    return EntryFacts(
        component="transformer",
        component_class="tests.Tiny",
        first_key=key,
        libraries={"torch": str(torch.__version__)},
    )


def layouts(count: int = 3) -> list[BlockLayout]:
    made = []
    for index in range(count):
        path = f"blocks.{index}"
        places, nbytes = image_layout({f"{path}.{n}": what for n, what in TENSORS.items()})
        made.append(BlockLayout(path=path, places=places, nbytes=nbytes))
    return made


def block(layout: BlockLayout, seed: int, *, gap: int = 0xEE) -> HostBlock:
    """Random bytes in every place, `gap` in every byte between, as two pieces."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.full((layout.nbytes,), gap, dtype=torch.uint8)
    for place in layout.places:
        image[place.offset_bytes : place.offset_bytes + place.nbytes] = torch.randint(
            0, 120, (place.nbytes,), dtype=torch.uint8, generator=generator
        )
    middle = layout.nbytes // 2 + 3
    pieces = (
        HostPiece(source=image[middle:], offset_bytes=middle),
        HostPiece(source=image[:middle], offset_bytes=0),
    )
    return HostBlock(path=layout.path, nbytes=layout.nbytes, places=layout.places, pieces=pieces)


def blocks(count: int = 3, seed: int = 0) -> Iterator[HostBlock]:
    for index, layout in enumerate(layouts(count)):
        yield block(layout, seed * 100 + index)


def publish(store: WeightStore, key: str = KEY, *, count: int = 3, seed: int = 0) -> CachedWeights:
    return store.publish(key, layouts(count), blocks(count, seed), facts(key), {"made": "here"})


def assert_holds(weights: CachedWeights, *, count: int = 3, seed: int = 0) -> None:
    """Every tensor is, bit for bit, what was published."""
    assert list(weights.blocks) == [layout.path for layout in layouts(count)]
    for original in blocks(count, seed):
        weights.check(original.path)
        stored = weights.blocks[original.path]
        assert (stored.nbytes, stored.places) == (original.nbytes, original.places)
        image = torch.zeros(original.nbytes, dtype=torch.uint8)
        for piece in original.pieces:
            image[piece.offset_bytes : piece.offset_bytes + piece.source.numel()] = piece.source
        views = host_views(stored)
        for place in original.places:
            wanted = image[place.offset_bytes : place.offset_bytes + place.nbytes]
            found = views[place.name].reshape(-1).view(torch.uint8) if place.nbytes else wanted
            assert torch.equal(found, wanted), place.name


def left_behind(root: Path) -> list[str]:
    """Everything in the store that is neither an entry, an index file nor a lock."""
    return [str(path) for path in root.glob("tmp/*")]
