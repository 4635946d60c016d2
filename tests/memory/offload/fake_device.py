"""A device that is the CPU, with streams whose copies run late.

A copy issued on a side stream waits in its queue until somebody waits for it, and its destination
holds NaN until then: who forgets to wait computes with NaN. A copy into memory that the compute
stream may still be reading, as far as events say, leaves NaN for good: so does early reuse.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omnistage.platforms.base import DeviceInfo, MemoryStats, PageLockError
from omnistage.platforms.cpu import CpuPlatform
from omnistage.platforms.registry import register_platform

POISON = 0xFF
"""Of every byte: NaN in all float dtypes, -1 in signed integers."""


class LateStream:
    """The compute stream runs its work at once; any other one only when it is waited for."""

    def __init__(self, platform: LatePlatform, *, is_compute: bool = False) -> None:
        self.platform = platform
        self.is_compute = is_compute
        self.issued = 0
        self.done = 0
        self.saw_compute_until = -1
        self._queue: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        with self.platform.lock:
            self.issued += 1
            if self.is_compute:
                self.done += 1
                work()
            else:
                self._queue.append(work)

    def run_until(self, position: int) -> None:
        with self.platform.lock:
            while self.done < position:
                self.done += 1
                self._queue.popleft()()

    def wait_event(self, event: LateEvent) -> None:
        if self.platform.ignores("wait", self) or event.stream is None:
            return
        stream, position = event.stream, event.position
        if stream.is_compute and not self.is_compute:
            self.saw_compute_until = max(self.saw_compute_until, event.tick)
        self.submit(lambda: stream.run_until(position))

    def wait_stream(self, stream: LateStream) -> None:
        event = self.platform.event("cpu")
        event.record(stream)
        self.wait_event(event)

    def query(self) -> bool:
        return self.done == self.issued

    def synchronize(self) -> None:
        self.run_until(self.issued)
        if self.is_compute:
            self.platform.compute_finished()


class LateEvent:
    def __init__(self, platform: LatePlatform) -> None:
        self._platform = platform
        self.stream: LateStream | None = None
        self.position = 0
        self.tick = -1

    def record(self, stream: LateStream | None = None) -> None:
        self.stream = stream or self._platform.current_stream("cpu")
        self.position = self.stream.issued
        self.tick = self._platform.next_tick()

    def wait(self, stream: LateStream | None = None) -> None:
        (stream or self._platform.current_stream("cpu")).wait_event(self)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.position

    def synchronize(self) -> None:
        if self.stream is not None and "host" not in self._platform.ignored_waits:
            self.stream.run_until(self.position)

    def elapsed_time(self, end_event: LateEvent) -> float:
        return float(end_event.tick - self.tick)


@dataclass(frozen=True)
class LockedRange:
    address: int
    nbytes: int
    read_only: bool

    def overlaps(self, address: int, nbytes: int) -> bool:
        return address < self.address + self.nbytes and self.address < address + nbytes

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


class LatePlatform(CpuPlatform):
    """Counts what it does. `refuse_lock` and `refuse_unlock` hold the numbers (from 1) of calls
    that fail; `fail_upload` maps the number of an upload to what it raises; `ignored_waits` names
    waits that are forgotten: "compute" by the compute stream, "copy" by all others, "host" by the
    host for an event."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.uploads = 0
        self.uploaded_bytes = 0
        self.unlocked_uploads = 0
        self.overtaken = 0
        self.lock_calls = 0
        self.unlock_calls = 0
        self.caches_emptied = 0
        self.locked: dict[int, LockedRange] = {}
        self.refuse_lock: set[int] = set()
        self.refuse_unlock: set[int] = set()
        self.fail_upload: dict[int, Exception] = {}
        self.ignored_waits: set[str] = set()
        self.memory_limit_bytes: int | None = None
        self._tick = 0
        self._copying = False
        self._compute = LateStream(self, is_compute=True)
        self._scope = threading.local()
        self._streams: weakref.WeakSet[LateStream] = weakref.WeakSet()
        self._pending: list[LockedRange] = []
        self._read_at: dict[int, int] = {}

    def offload_unavailable_reason(self) -> str | None:
        return None

    def stream(self, device: str) -> LateStream:
        stream = LateStream(self)
        self._streams.add(stream)
        return stream

    def current_stream(self, device: str) -> LateStream:
        return getattr(self._scope, "stream", self._compute)

    @contextmanager
    def stream_scope(self, stream: LateStream) -> Iterator[None]:
        before = self.current_stream("cpu")
        self._scope.stream = stream
        try:
            yield
        finally:
            self._scope.stream = before

    def event(self, device: str, *, timing: bool = False) -> LateEvent:
        return LateEvent(self)

    def synchronize(self, device: str) -> None:
        for stream in list(self._streams):
            stream.synchronize()
        self.compute_finished()

    def enqueue(self, work: Callable[[], None]) -> None:
        """Work on the current stream: at once on the compute stream, else in its queue's turn."""
        stream = self.current_stream("cpu")

        def unwatched() -> None:
            with self._unwatched():
                work()

        stream.submit(work if stream.is_compute else unwatched)

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert source.numel() == destination.numel(), "an upload fills its destination"
        self.uploads += 1
        self.uploaded_bytes += source.nbytes
        if error := self.fail_upload.pop(self.uploads, None):
            raise error
        stream = self.current_stream("cpu")
        overtakes = self._overtakes(stream, destination)
        self.overtaken += overtakes
        if not self.is_locked(source):
            self.unlocked_uploads += 1
            source = source.clone()
        if not stream.is_compute:
            with self._unwatched():
                _poison(destination)
        using = LockedRange(source.data_ptr(), source.nbytes, True)
        self._pending.append(using)

        def copy() -> None:
            self._pending.remove(using)
            with self._unwatched():
                destination.copy_(source)
                if overtakes:
                    _poison(destination)

        stream.submit(copy)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Copies run inside of who waits for them, and are no reads of compute."""
        before, self._copying = self._copying, True
        try:
            yield
        finally:
            self._copying = before

    def _overtakes(self, stream: LateStream, destination: torch.Tensor) -> bool:
        read_at = self._read_at.get(destination.untyped_storage().data_ptr(), -1)
        return not stream.is_compute and stream.saw_compute_until < read_at

    def is_locked(self, source: torch.Tensor) -> bool:
        return any(one.holds(source.data_ptr(), source.nbytes) for one in self.locked.values())

    @contextmanager
    def watching_reads(self) -> Iterator[None]:
        """Inside, every operation of torch counts as work of the compute stream that reads its
        tensors, so that copies which may overtake it are found. Not with compiled code."""
        with _ReadWatch(self):
            yield

    def note_read(self, tensor: torch.Tensor) -> None:
        if not self._copying and self.current_stream("cpu").is_compute:
            self._read_at[tensor.untyped_storage().data_ptr()] = self.next_tick()

    def compute_finished(self) -> None:
        self._read_at.clear()

    def next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def ignores(self, what: str, stream: LateStream) -> bool:
        return ("compute" if stream.is_compute else "copy") in self.ignored_waits

    def lock_pages(self, address: int, nbytes: int, device: str, *, read_only: bool) -> None:
        self.lock_calls += 1
        assert address % 4096 == 0, "an address to lock is a multiple of the page size"
        assert nbytes % 4096 == 0, "a size to lock is a multiple of the page size"
        assert nbytes > 0
        if self.lock_calls in self.refuse_lock:
            raise PageLockError(f"injected: lock {self.lock_calls} refused")
        if any(one.overlaps(address, nbytes) for one in self.locked.values()):
            raise PageLockError("part of the range is locked already")
        self.locked[address] = LockedRange(address, nbytes, read_only)

    def unlock_pages(self, address: int, device: str) -> None:
        self.unlock_calls += 1
        if self.unlock_calls in self.refuse_unlock:
            raise PageLockError(f"injected: unlock {self.unlock_calls} refused")
        if address not in self.locked:
            raise PageLockError("nothing is locked at this address")
        one = self.locked[address]
        assert not any(one.overlaps(using.address, using.nbytes) for using in self._pending), (
            "pages are unlocked while a copy from them is under way"
        )
        del self.locked[address]

    @property
    def locked_bytes(self) -> int:
        return sum(one.nbytes for one in self.locked.values())

    def limit_memory(self, device: str, limit_bytes: int | None) -> None:
        """Said by `devices` and `memory_stats`; allocations do not fail (see `fail_upload`)."""
        self.memory_limit_bytes = limit_bytes

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(
            replace(info, total_bytes=self._limited(info.total_bytes), free_bytes=None)
            if self.memory_limit_bytes is not None
            else info
            for info in super().devices()
        )

    def memory_stats(self, device: str) -> MemoryStats:
        stats = super().memory_stats(device)
        return replace(stats, total_bytes=self._limited(stats.total_bytes))

    def _limited(self, total_bytes: int) -> int:
        return min(total_bytes, self.memory_limit_bytes or total_bytes)

    def empty_cache(self, device: str) -> None:
        self.caches_emptied += 1


class _ReadWatch(TorchDispatchMode):
    def __init__(self, platform: LatePlatform) -> None:
        super().__init__()
        self._platform = platform

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:  # `x.data = y` asks
            return func(*args, **kwargs)
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._platform.note_read(value)
        return func(*args, **kwargs)


def _poison(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).fill_(POISON)


@contextmanager
def late_device() -> Iterator[LatePlatform]:
    """In force in this process while the context is open, under the name "cpu"."""
    with register_platform(LatePlatform()) as platform:
        assert isinstance(platform, LatePlatform)
        yield platform
