"""The late device must show what it is for: a forgotten wait, and reuse that comes too early."""

from __future__ import annotations

import mmap

import pytest
import torch

from omnistage.platforms.base import PageLockError
from tests.memory.offload.fake_device import POISON, late_device


@pytest.fixture
def platform():
    with late_device() as platform:
        yield platform


def _bytes(value: int) -> torch.Tensor:
    return torch.full((4096,), value, dtype=torch.uint8)


def test_a_copy_runs_when_it_is_waited_for(platform):
    destination, stream = _bytes(0), platform.stream("cpu")
    with platform.stream_scope(stream):
        platform.upload(destination, _bytes(3))
        copied = platform.event("cpu")
        copied.record()
    assert destination[0] == POISON
    assert not copied.query()
    platform.current_stream("cpu").wait_event(copied)
    assert torch.equal(destination, _bytes(3))
    assert copied.query()


def test_streams_keep_their_order(platform):
    first, second = platform.stream("cpu"), platform.stream("cpu")
    destination = _bytes(0)
    with platform.stream_scope(first):
        platform.upload(destination, _bytes(1))
    second.wait_stream(first)
    with platform.stream_scope(second):
        platform.upload(destination, _bytes(2))
    platform.synchronize("cpu")
    assert torch.equal(destination, _bytes(2))


def test_a_copy_that_overtakes_a_read_spoils_its_destination(platform):
    destination, stream = _bytes(0), platform.stream("cpu")
    with platform.watching_reads():
        destination + 1
    with platform.stream_scope(stream):
        platform.upload(destination, _bytes(1))
    stream.synchronize()
    assert platform.overtaken == 1
    assert torch.equal(destination, _bytes(POISON))


def test_locked_memory_is_read_late_and_any_other_at_once(platform):
    pages = mmap.mmap(-1, 4096)
    locked = torch.frombuffer(pages, dtype=torch.uint8)
    platform.lock_pages(locked.data_ptr(), 4096, "cpu", read_only=False)
    unlocked, stream = _bytes(1), platform.stream("cpu")
    late, early = _bytes(0), _bytes(0)
    with platform.stream_scope(stream):
        platform.upload(late, locked.fill_(1))
        platform.upload(early, unlocked)
    locked.fill_(2)
    unlocked.fill_(2)
    with pytest.raises(AssertionError, match="under way"):
        platform.unlock_pages(locked.data_ptr(), "cpu")
    stream.synchronize()
    assert (late[0], early[0]) == (2, 1)
    platform.unlock_pages(locked.data_ptr(), "cpu")
    assert platform.locked_bytes == 0
    assert platform.unlocked_uploads == 1


def test_locks_and_copies_can_be_refused(platform):
    pages = torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8)
    platform.refuse_lock, platform.refuse_unlock = {2}, {1}
    platform.lock_pages(pages.data_ptr(), 4096, "cpu", read_only=True)
    with pytest.raises(PageLockError):
        platform.lock_pages(pages.data_ptr() + 4096, 4096, "cpu", read_only=True)
    with pytest.raises(PageLockError):
        platform.unlock_pages(pages.data_ptr(), "cpu")
    platform.unlock_pages(pages.data_ptr(), "cpu")
    platform.fail_upload[1] = torch.OutOfMemoryError("injected")
    with pytest.raises(torch.OutOfMemoryError):
        platform.upload(_bytes(0), _bytes(1))


def test_the_device_is_as_small_as_its_limit(platform):
    platform.limit_memory("cpu", 2**20)
    assert platform.device_info("cpu").total_bytes == 2**20
    assert platform.memory_stats("cpu").total_bytes == 2**20
