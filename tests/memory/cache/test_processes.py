"""Several processes at one store: one writes, others join; a death leaves nothing for good."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnistage.memory.cache import eviction
from omnistage.memory.cache.entry import Entry
from omnistage.memory.cache.errors import CacheError
from omnistage.memory.cache.lock import FileLock
from omnistage.memory.cache.store import WeightStore
from omnistage.memory.cache.weights import CachedWeights
from omnistage.memory.offload.host import HostBlock
from tests.memory.cache.making import (
    KEY,
    OTHER_KEY,
    assert_holds,
    facts,
    layouts,
    left_behind,
    publish,
)
from tests.memory.cache.other_process import let_go, other_process


def never() -> Iterator[HostBlock]:
    raise AssertionError("written twice")
    yield


@pytest.mark.invariant("CACHE-INV-006")
def test_one_process_writes_and_the_other_joins(tmp_path: Path) -> None:
    joined: list[CachedWeights] = []
    store = WeightStore(tmp_path, wait_s=60)

    def join() -> None:
        joined.append(store.publish(KEY, layouts(), never(), facts()))

    def look() -> None:
        opened = store.open(KEY)
        assert opened is not None
        joined.append(opened)

    with other_process("write", tmp_path) as writer:
        waiting = [threading.Thread(target=join), threading.Thread(target=look)]
        for thread in waiting:
            thread.start()
        assert joined == []
        let_go(writer)
        for thread in waiting:
            thread.join(60)
    assert len(joined) == 2
    for weights in joined:
        assert_holds(weights)
        weights.close()
    assert left_behind(tmp_path) == []


@pytest.mark.invariant("CACHE-INV-006")
def test_waiting_for_a_writer_is_bounded_and_a_dead_one_is_no_obstacle(tmp_path: Path) -> None:
    impatient = WeightStore(tmp_path, wait_s=0.05)
    with other_process("write", tmp_path) as writer:
        with pytest.raises(CacheError, match="another process"):
            impatient.publish(KEY, layouts(), never(), facts())
        with pytest.raises(CacheError, match="another process"):
            impatient.open(KEY)
        publish(impatient, OTHER_KEY, seed=1).close()
        assert len(left_behind(tmp_path)) == 1, "nobody touches what is being written"
        assert impatient.folders.remove_all_stale() == 0
        writer.kill()
        writer.wait(60)
    assert len(left_behind(tmp_path)) == 1
    assert impatient.open(KEY) is None
    recovered = publish(impatient)
    assert_holds(recovered)
    recovered.close()
    assert left_behind(tmp_path) == []


def test_what_dead_writers_left_can_be_swept_without_writing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    with other_process("write", tmp_path) as writer:
        writer.kill()
        writer.wait(60)
    assert store.folders.remove_all_stale() == 1
    assert left_behind(tmp_path) == []


@pytest.mark.invariant("CACHE-INV-007")
def test_an_entry_that_another_process_uses_stays(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    publish(store).close()
    with other_process("read", tmp_path) as reader:
        assert [state.in_use for state in eviction.states(store.folders)] == [True]
        gone, kept = eviction.remove_if(store.folders, lambda state: True)
        assert (len(gone), len(kept)) == (0, 1)
        nbytes = kept[0].nbytes
        bounded = WeightStore(tmp_path, limit_bytes=int(nbytes * 1.5))
        with pytest.raises(CacheError, match="entries in use"):
            publish(bounded, OTHER_KEY, seed=1)
        mine = store.open(KEY)
        assert mine is not None
        let_go(reader)
    gone, kept = eviction.remove_if(store.folders, lambda state: True)
    assert (len(gone), len(kept)) == (0, 1), "this process still has it open"
    assert_holds(mine)
    mine.close()
    gone, kept = eviction.remove_if(store.folders, lambda state: True)
    assert (len(gone), len(kept)) == (1, 0)


@pytest.mark.invariant("CACHE-INV-007")
def test_a_reader_of_a_damaged_entry_keeps_its_pages_while_it_is_taken_away(
    tmp_path: Path,
) -> None:
    store = WeightStore(tmp_path)
    publish(store).close()
    with other_process("read", tmp_path) as reader:
        (folder,) = store.folders.entries.iterdir()
        mine = store.open(KEY)
        assert mine is not None
        mine._on_damage("as if")
        assert not folder.exists()
        let_go(reader)
        assert_holds(mine)
        mine.close()


@pytest.mark.invariant("CACHE-INV-001")
def test_an_entry_that_is_replaced_while_it_is_opened_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one file could be mapped and its successor verified."""
    store = WeightStore(tmp_path)
    publish(store).close()
    read = Entry.read

    def replaced(folder: Path) -> Entry:
        entry = read(folder)
        with monkeypatch.context() as patch:
            patch.setattr(Entry, "read", read)
            store.folders.discard(folder)
            publish(store).close()
        return entry

    monkeypatch.setattr(Entry, "read", replaced)
    assert store.open(KEY) is None


def test_nothing_stays_open(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, shard_bytes=1)
    before = sorted(os.listdir("/proc/self/fd"))
    weights = publish(store)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    weights.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_lock_is_on_the_file_that_the_path_names(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock.acquire(path)
    assert first is not None
    assert FileLock.acquire(path) is None
    assert FileLock.acquire(path, shared=True, wait_s=0.01) is None
    path.unlink()
    assert not first.is_of_path()
    second = FileLock.acquire(path)
    assert second is not None
    first.release()
    first.release()
    assert FileLock.acquire(path) is None
    second.release()
    shared = [FileLock.acquire(path, shared=True) for _ in range(2)]
    assert all(shared)
    assert FileLock.acquire(path) is None
