"""All that is asked for is locked, or nothing, and nothing stays locked."""

from __future__ import annotations

import pytest
import torch

from omnistage.contracts.errors import StageLostError
from omnistage.memory.host import page_lock
from omnistage.memory.host.mapping import PAGE_BYTES, AnonymousMemory, MappedFile
from omnistage.memory.host.page_lock import PageLocks, pages_of

PAGES = 64


@pytest.fixture
def memory():
    return AnonymousMemory(PAGES * PAGE_BYTES)


def relative(memory, ranges):
    return [
        ((one.start - memory.address) / PAGE_BYTES, (one.stop - memory.address) / PAGE_BYTES)
        for one in ranges
    ]


def parts(memory, *bounds):
    return [memory.bytes[start:stop] for start, stop in bounds]


def ranges_of(memory, *pages):
    """One range for each of these pages."""
    bounds = [(page * PAGE_BYTES, (page + 1) * PAGE_BYTES) for page in pages]
    return pages_of(memory, parts(memory, *bounds))


def test_pages_are_whole_and_those_that_touch_are_one_range(memory):
    page = PAGE_BYTES
    pieces = parts(
        memory,
        (9 * page + 10, 10 * page),
        (100, 200),
        (300, page + 1),
        (2 * page, 3 * page),
        (5 * page - 1, 5 * page + 1),
        (7 * page, 7 * page),
    )
    assert relative(memory, pages_of(memory, pieces)) == [(0, 3), (4, 6), (9, 10)]


def test_the_last_page_of_a_file_is_locked_whole(tmp_path, device):
    (tmp_path / "weights").write_bytes(bytes(PAGE_BYTES + 1))
    memory = MappedFile(tmp_path / "weights")
    ranges = pages_of(memory, [memory.bytes])
    assert relative(memory, ranges) == [(0, 2)]
    locks = PageLocks.acquire(ranges, device, "cpu", None)
    assert [one.read_only for one in device.locked.values()] == [True]
    locks.release()


@pytest.mark.invariant("HOST-INV-004")
def test_locks_are_counted_and_released(memory, device):
    locks = PageLocks.acquire(ranges_of(memory, 0, 2, 3), device, "cpu", 3 * PAGE_BYTES)
    assert locks.locked_bytes == device.locked_bytes == 3 * PAGE_BYTES
    assert device.lock_calls == 2
    assert [one.read_only for one in device.locked.values()] == [False, False]
    locks.release()
    locks.release()
    assert device.locked == {}
    assert device.unlock_calls == 2
    assert locks.locked_bytes == 0


@pytest.mark.invariant("HOST-INV-004")
@pytest.mark.parametrize("limit_bytes", [0, 3 * PAGE_BYTES - 1])
def test_more_than_the_limit_is_refused_before_the_first_call(memory, device, limit_bytes):
    assert PageLocks.acquire(ranges_of(memory, 0, 2, 4), device, "cpu", limit_bytes) is None
    assert device.lock_calls == 0


@pytest.mark.invariant("HOST-INV-004")
@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_refusal_undoes_what_was_locked_before(memory, device, refused):
    device.refuse_lock = {refused}
    assert PageLocks.acquire(ranges_of(memory, 0, 2, 4), device, "cpu", None) is None
    assert device.lock_calls == refused
    assert device.locked == {}


@pytest.mark.invariant("HOST-INV-004")
def test_any_other_error_undoes_it_as_well(memory, device, monkeypatch):
    lock = device.lock_pages

    def interrupted(address, nbytes, name, *, read_only):
        if device.lock_calls == 1:
            raise KeyboardInterrupt
        lock(address, nbytes, name, read_only=read_only)

    monkeypatch.setattr(device, "lock_pages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PageLocks.acquire(ranges_of(memory, 0, 2), device, "cpu", None)
    assert device.locked == {}


@pytest.mark.invariant("HOST-INV-005")
def test_a_failed_rollback_ends_the_stage_and_keeps_the_mapping(memory, device, monkeypatch):
    kept = []
    monkeypatch.setattr(page_lock, "_LOCKED_FOR_GOOD", kept)
    device.refuse_lock, device.refuse_unlock = {3}, {1}
    with pytest.raises(StageLostError, match="1 page-locked range") as caught:
        PageLocks.acquire(ranges_of(memory, 0, 2, 4), device, "cpu", None)
    assert "injected" in caught.value.detail
    assert kept == [memory.mapping]
    assert len(device.locked) == 1
    assert device.unlock_calls == 2


def test_a_tensor_of_locked_memory_is_copied_without_staging(memory, device):
    locks = PageLocks.acquire(ranges_of(memory, 0), device, "cpu", None)
    destination = torch.empty(100, dtype=torch.uint8)
    device.upload(destination, memory.bytes[:100])
    assert device.unlocked_uploads == 0
    locks.release()
