"""Whatever happens to the files of an entry: wrong weights are never handed out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from omnistage.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineExceededError,
)
from omnistage.memory.cache.entry import Entry
from omnistage.memory.cache.location import weight_cache_folder
from omnistage.memory.cache.manifest import Manifest, sealed, unsealed
from omnistage.memory.cache.store import WeightStore
from omnistage.memory.cache.weights import CachedWeights
from tests.memory.cache.making import KEY, assert_holds, left_behind, publish


def folder_of(store: WeightStore) -> Path:
    publish(store).close()
    (folder,) = store.folders.entries.iterdir()
    return folder


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


def flip(path: Path, offset_bytes: int) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        (byte,) = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 0x10]))


def truncated(folder: Path) -> None:
    shard(folder).chmod(0o644)
    with shard(folder).open("r+b") as file:
        file.truncate(shard(folder).stat().st_size - 1)


def header_flipped(folder: Path) -> None:
    flip(shard(folder), 20)


def header_length_flipped(folder: Path) -> None:
    flip(shard(folder), 0)


def shard_missing(folder: Path) -> None:
    shard(folder).unlink()


def manifest_missing(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def manifest_malformed(folder: Path) -> None:
    rewrite(folder, b"{")


def manifest_empty(folder: Path) -> None:
    rewrite(folder, b"")


def manifest_flipped(folder: Path) -> None:
    flip(folder / "manifest.json", 200)


def manifest_of_other_content(folder: Path) -> None:
    change_manifest(folder, lambda content: content["blocks"][0].update(sha256="0" * 64))


def manifest_sealed_for_other_places(folder: Path) -> None:
    def swap(content: dict) -> None:
        blocks = content["blocks"]
        for name in ("offset_bytes", "file"):
            blocks[0][name], blocks[1][name] = blocks[1][name], blocks[0][name]
        blocks[0]["offset_bytes"] += 4096 * 1000

    change_manifest(folder, swap)


def manifest_of_another_format(folder: Path) -> None:
    change_manifest(folder, lambda content: content.update(format=99))


def lock_file_missing(folder: Path) -> None:
    (folder / "in_use.lock").unlink()


def change_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_bytes())["content"]
    change(content)
    rewrite(folder, sealed(unsealed_of(content)))


def unsealed_of(content: dict) -> Manifest:
    import msgspec

    return msgspec.convert(content, Manifest)


def rewrite(folder: Path, data: bytes) -> None:
    path = folder / "manifest.json"
    path.chmod(0o644)
    path.write_bytes(data)


SEEN_AT_ONCE = (
    truncated,
    header_flipped,
    header_length_flipped,
    shard_missing,
    manifest_missing,
    manifest_malformed,
    manifest_empty,
    manifest_flipped,
    manifest_of_other_content,
    manifest_sealed_for_other_places,
    manifest_of_another_format,
    lock_file_missing,
)


@pytest.mark.invariant("CACHE-INV-004")
@pytest.mark.parametrize("damage", SEEN_AT_ONCE, ids=lambda damage: damage.__name__)
def test_damage_that_opening_sees(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = WeightStore(tmp_path, shard_bytes=8192)
    folder = folder_of(store)
    damage(folder)
    assert store.open(KEY) is None
    assert "is damaged" in caplog.text
    assert not folder.exists()
    assert left_behind(tmp_path) == []
    again = publish(store)
    assert_holds(again)
    again.close()


@pytest.mark.invariant("CACHE-INV-001")
@pytest.mark.invariant("CACHE-INV-004")
def test_a_flipped_bit_in_a_block_raises_before_its_first_use(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    folder = folder_of(store)
    last = Entry.read(folder).manifest.blocks[-1]
    flip(folder / last.file, last.offset_bytes + 7)
    weights = store.open(KEY)
    assert weights is not None
    with pytest.raises(CheckpointError, match=r"blocks\.2.*damaged.*start again"):
        weights.check(last.path)
    assert not folder.exists()
    weights.close()
    assert store.open(KEY) is None
    again = publish(store)
    assert_holds(again)
    again.close()


@pytest.mark.invariant("CACHE-INV-001")
def test_every_bit_of_an_image_counts(tmp_path: Path) -> None:
    """Also those of gaps inside it: they are copied too."""
    store = WeightStore(tmp_path)
    for offset_bytes in (0, 4001, -1):
        folder = folder_of(store)
        block = Entry.read(folder).manifest.blocks[1]
        flip(folder / block.file, block.offset_bytes + offset_bytes % block.nbytes)
        weights = store.open(KEY)
        assert weights is not None
        with pytest.raises(CheckpointError):
            weights.check(block.path)
        weights.close()


@pytest.mark.invariant("CACHE-INV-004")
def test_padding_between_blocks_is_used_by_nobody_and_found_by_a_full_verification(
    tmp_path: Path,
) -> None:
    store = WeightStore(tmp_path)
    folder = folder_of(store)
    entry = Entry.read(folder)
    assert list(entry.damages()) == []
    first, second = entry.manifest.blocks[:2]
    assert first.offset_bytes + first.nbytes < second.offset_bytes
    flip(folder / first.file, second.offset_bytes - 1)
    assert list(entry.damages()) == [f"{first.file}: padding differs from its digest"]
    flip(folder / first.file, second.offset_bytes)
    assert list(entry.damages()) == [f"{first.file}: blocks.1 differs from its digest"]


@pytest.mark.invariant("CACHE-INV-004")
def test_a_damaged_entry_is_replaced_by_whoever_publishes_the_same_content(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    folder = folder_of(store)
    truncated(folder)
    weights = publish(store, "c" * 64)
    assert weights.entry.folder == folder
    assert_holds(weights)
    weights.close()


NESTED = b'{"sha256": "00", "content": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"sha256": "00", "content": {}}', NESTED], ids=range(4)
)
def test_a_damaged_index_file_is_as_good_as_none(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = WeightStore(tmp_path)
    folder = folder_of(store)
    index = store.folders.index_of(KEY)
    index.unlink()
    index.write_bytes(data)
    assert store.open(KEY) is None
    assert "is damaged and not used" in caplog.text
    weights = publish(store)
    assert weights.entry.folder == folder
    weights.close()


def test_a_stray_file_among_temporary_folders_does_not_stop_publishing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.folders.make()
    (store.folders.tmp / f"{KEY}.stray").write_text("x")
    publish(store).close()
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("setting", ["a\0b", "~no-such-user/cache"])
def test_a_folder_that_cannot_be_is_refused(setting: str) -> None:
    with pytest.raises(ConfigurationError, match="another weight_cache_dir"):
        weight_cache_folder(setting)


def test_an_index_file_of_another_key_is_not_believed(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    folder_of(store)
    store.folders.index_of("c" * 64).write_bytes(store.folders.index_of(KEY).read_bytes())
    assert store.open("c" * 64) is None


def test_a_check_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    go_on = threading.Event()
    verify = CachedWeights._verify

    def slow(self: CachedWeights, record: object) -> str | None:
        go_on.wait(30)
        return verify(self, record)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedWeights, "_verify", slow)
    weights = publish(WeightStore(tmp_path, check_deadline_s=0.01))
    with pytest.raises(DeadlineExceededError, match=r"blocks\.0.*weight_cache_dir"):
        weights.check("blocks.0")
    go_on.set()
    weights.close()


@pytest.mark.invariant("CACHE-INV-004")
def test_a_file_that_shrinks_while_it_is_verified_is_damage_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path, shard_bytes=1)
    folder = folder_of(store)
    verify = CachedWeights._verify

    def after_truncation(self: CachedWeights, record: object) -> str | None:
        if shard(folder).exists():
            shard(folder).chmod(0o644)
            with shard(folder).open("r+b") as file:
                file.truncate(4096)
        return verify(self, record)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedWeights, "_verify", after_truncation)
    weights = store.open(KEY)
    assert weights is not None
    with pytest.raises(CheckpointError, match="damaged"):
        weights.check("blocks.2")
    weights.close()


def test_a_manifest_survives_its_seal(tmp_path: Path) -> None:
    manifest = Entry.read(folder_of(WeightStore(tmp_path))).manifest
    assert unsealed(sealed(manifest), Manifest) == manifest
