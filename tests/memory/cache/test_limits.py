"""Size bound, eviction, and disks that are full or cannot be written."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from omnistage.memory.cache import index
from omnistage.memory.cache import store as store_module
from omnistage.memory.cache.errors import CacheError
from omnistage.memory.cache.eviction import states
from omnistage.memory.cache.store import WeightStore
from omnistage.memory.cache.writer import IN_USE_NAME
from tests.memory.cache.making import KEY, assert_holds, left_behind, publish

KEYS = [letter * 64 for letter in "abcd"]


def names(store: WeightStore) -> list[str]:
    return [state.name for state in states(store.folders)]


def entry_bytes(tmp_path: Path) -> int:
    store = WeightStore(tmp_path / "measured")
    publish(store).close()
    return states(store.folders)[0].nbytes


def set_used(store: WeightStore, name: str, used_s: float) -> None:
    os.utime(store.folders.entries / name / IN_USE_NAME, (used_s, used_s))


@pytest.mark.invariant("CACHE-INV-007")
def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", limit_bytes=int(entry_bytes(tmp_path) * 3.5))
    folders = []
    for seed, key in enumerate(KEYS[:3]):
        weights = publish(store, key, seed=seed)
        folders.append(weights.entry.folder.name)
        weights.close()
    for used_s, name in enumerate(folders):
        set_used(store, name, 1000.0 + used_s)
    assert names(store) == folders
    opened = store.open(KEYS[0])
    assert opened is not None
    opened.close()
    assert names(store) == [folders[1], folders[2], folders[0]]
    publish(store, KEYS[3], seed=3).close()
    assert folders[1] not in names(store)
    assert {folders[0], folders[2]} < set(names(store))
    assert sum(state.nbytes for state in states(store.folders)) <= (store.limit_bytes or 0)
    assert store.open(KEYS[1]) is None


@pytest.mark.invariant("CACHE-INV-007")
def test_what_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    nbytes = entry_bytes(tmp_path)
    store = WeightStore(tmp_path / "store", limit_bytes=int(nbytes * 1.2))
    publish(store).close()
    with pytest.raises(CacheError, match="weight_cache_limit_gib allows"):
        publish(store, KEYS[1], count=6, seed=1)
    assert len(names(store)) == 1
    assert left_behind(tmp_path / "store") == []


@pytest.mark.invariant("CACHE-INV-005")
def test_too_little_disk_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(CacheError, match=r"are free on the disk of .*weight_cache_dir"):
        publish(WeightStore(tmp_path))
    assert left_behind(tmp_path) == []


FULL = """
import resource, sys
from pathlib import Path
from omnistage.memory.cache.store import WeightStore
from tests.memory.cache.making import KEY, left_behind, publish
folder, bound = Path(sys.argv[1]), int(sys.argv[2])
store = WeightStore(folder)
resource.setrlimit(resource.RLIMIT_FSIZE, (bound, resource.RLIM_INFINITY))
try:
    publish(store)
except OSError as error:
    print(error.errno, left_behind(folder), list(folder.glob("entries/*")), flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
publish(store).close()
print("published")
"""


@pytest.mark.invariant("CACHE-INV-005")
def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    """By the kernel's own bound of file sizes, amid the data."""
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), "10000"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.splitlines() == [f"{errno.EFBIG} [] []", "published"]


@pytest.mark.invariant("CACHE-INV-005")
@pytest.mark.parametrize(
    ("module", "name"),
    [(store_module, "write_entry"), (store_module, "sync_folder"), (index, "write_durably")],
)
def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    """The last two fail after the entry is in place: then it may stay, as it is whole."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = WeightStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, full)
        with pytest.raises(OSError, match="No space left"):
            publish(store)
    assert left_behind(tmp_path) == []
    assert list(tmp_path.glob("index/*")) == []
    assert store.open(KEY) is None
    weights = publish(store)
    assert_holds(weights)
    weights.close()


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    from tests.memory.cache.making import blocks, facts, layouts

    def interrupted():  # type: ignore[no-untyped-def]
        yield from list(blocks())[:1]
        raise KeyboardInterrupt

    store = WeightStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.publish(KEY, layouts(), interrupted(), facts())
    assert left_behind(tmp_path) == []
    publish(store).close()


@pytest.mark.invariant("CACHE-INV-007")
def test_files_of_others_beside_entries_are_in_nobodys_way(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", limit_bytes=int(entry_bytes(tmp_path) * 1.5))
    publish(store).close()
    stray = store.folders.entries / ".DS_Store"
    stray.touch()
    publish(store, KEYS[1], seed=1).close()
    assert len(states(store.folders)) == 1
    assert stray.exists()
