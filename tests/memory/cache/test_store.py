"""Publishing and opening: what goes in comes out, from a file that others can read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from omnistage.memory.cache.errors import CacheError
from omnistage.memory.cache.files import PADDING_PREFIX
from omnistage.memory.cache.store import WeightStore
from omnistage.memory.offload.host import HostBacking, HostBlock, HostPiece
from tests.memory.cache.making import (
    KEY,
    OTHER_KEY,
    assert_holds,
    block,
    blocks,
    facts,
    layouts,
    left_behind,
    publish,
)


@pytest.mark.invariant("CACHE-INV-001")
def test_what_is_published_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    assert store.open(KEY) is None
    published = publish(store)
    assert_holds(published)
    published.close()
    reopened = store.open(KEY)
    assert reopened is not None
    assert reopened.backing is HostBacking.RUNTIME_CACHE
    assert_holds(reopened)
    with pytest.raises(AssertionError):
        assert_holds(reopened, seed=1)
    reopened.close()
    reopened.close()
    assert left_behind(tmp_path) == []


@pytest.mark.invariant("CACHE-INV-002")
@pytest.mark.parametrize("shard_bytes", [1, 20_000, 2**30])
def test_a_block_is_one_piece_on_a_page_of_a_safetensors_file(
    tmp_path: Path, shard_bytes: int
) -> None:
    weights = publish(WeightStore(tmp_path, shard_bytes=shard_bytes))
    assert_holds(weights)
    manifest = weights.entry.manifest
    assert len(manifest.files) == {1: 3, 20_000: 2, 2**30: 1}[shard_bytes]
    for record in manifest.blocks:
        assert record.offset_bytes % 4096 == 0
        (piece,) = weights.blocks[record.path].pieces
        assert piece.offset_bytes == 0
        assert piece.source.numel() == record.nbytes
        assert piece.source.data_ptr() % 4096 == 0
    found = {}
    for file in manifest.files:
        with safe_open(weights.entry.folder / file.name, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                if name.startswith(PADDING_PREFIX):
                    assert not reader.get_tensor(name).any()
                else:
                    found[name] = reader.get_tensor(name)
    for original in blocks():
        image = torch.empty(original.nbytes, dtype=torch.uint8)
        for piece in original.pieces:
            image[piece.offset_bytes : piece.offset_bytes + piece.source.numel()] = piece.source
        for place in original.places:
            tensor = found.pop(place.name)
            assert tuple(tensor.shape) == place.shape
            assert str(tensor.dtype) == f"torch.{place.dtype}"
            begin = place.offset_bytes
            if place.nbytes:
                flat = tensor.reshape(-1).view(torch.uint8)
                assert torch.equal(flat, image[begin : begin + place.nbytes])
    assert found == {}
    weights.close()


@pytest.mark.invariant("CACHE-INV-003")
def test_other_bytes_are_another_entry_and_the_same_bytes_the_same(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    first, second = publish(store), publish(store, OTHER_KEY)
    assert first.entry.folder == second.entry.folder
    third = publish(store, "c" * 64, seed=1)
    assert third.entry.folder != first.entry.folder
    assert first.entry.manifest.first_key == KEY
    for weights in (first, second):
        assert_holds(weights)
    assert_holds(third, seed=1)
    for weights in (first, second, third):
        weights.close()


@pytest.mark.invariant("CACHE-INV-003")
def test_gaps_do_not_count(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    made = [
        store.publish(key, layouts(1), [block(layouts(1)[0], 0, gap=gap)], facts(key))
        for key, gap in ((KEY, 0x11), (OTHER_KEY, 0x22))
    ]
    assert made[0].entry.folder == made[1].entry.folder
    for weights in made:
        assert_holds(weights, count=1)
        weights.close()


def test_a_key_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    publish(store).close()

    def never() -> HostBlock:
        raise AssertionError("asked for a block")

    joined = store.publish(KEY, layouts(), (never() for _ in range(1)), facts())
    assert_holds(joined)
    joined.close()


def test_blocks_are_taken_one_by_one(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, shard_bytes=1)
    alive = []

    def watched():  # type: ignore[no-untyped-def]
        for one in blocks():
            alive.append(
                sum(path.stat().st_size > 4096 for path in tmp_path.rglob("*.safetensors"))
            )
            yield one

    weights = store.publish(KEY, layouts(), watched(), facts())
    assert alive == [0, 1, 2]
    weights.close()


@pytest.mark.invariant("CACHE-INV-005")
def test_what_cannot_be_stored_leaves_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    layout = layouts(1)[0]
    whole = block(layout, 0)
    half = replace(whole, pieces=whole.pieces[1:])
    with pytest.raises(CacheError, match="are not all there"):
        store.publish(KEY, [layout], [half], facts())
    with pytest.raises(CacheError, match="another layout"):
        store.publish(KEY, [replace(layout, path="elsewhere")], [whole], facts())
    with pytest.raises(CacheError, match="another layout"):
        store.publish(KEY, layouts(2), [whole], facts())
    with pytest.raises(CacheError, match="one name"):
        store.publish(KEY, [layout, layout], [whole, whole], facts())
    overlapping = tuple(replace(place, offset_bytes=0) for place in layout.places)
    with pytest.raises(CacheError, match="overlaps"):
        store.publish(KEY, [replace(layout, places=overlapping)], [whole], facts())
    beyond = replace(layout, nbytes=256)
    with pytest.raises(CacheError, match="ends after"):
        store.publish(KEY, [beyond], [whole], facts())
    assert store.open(KEY) is None
    assert left_behind(tmp_path) == []
    assert list(tmp_path.glob("entries/*")) == []


def test_a_block_without_bytes(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    empty = replace(layouts(1)[0], path="empty", places=(), nbytes=0)
    bytesless = HostBlock(path="empty", nbytes=0, places=(), pieces=())
    full = layouts(1)[0]
    weights = store.publish(KEY, [empty, full], [bytesless, block(full, 0)], facts())
    weights.check("empty")
    assert weights.blocks["empty"].pieces == ()
    assert isinstance(weights.blocks[full.path].pieces[0], HostPiece)
    weights.close()
