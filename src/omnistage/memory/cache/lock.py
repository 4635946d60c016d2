"""Locks between processes: `flock` on a file. The kernel frees them when their holder dies, so a
lock file that lies there says nothing; only a lock that is held does."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.02
"""flock has no deadline of its own; between two tries."""


class FileLock:
    """Held until `release`, or the end of the process. `descriptor` is the open lock file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def acquire(
        cls, path: Path, *, shared: bool = False, wait_s: float = 0.0, create: bool = True
    ) -> FileLock | None:
        """None when others still hold it after `wait_s`. Raises `OSError` when the file cannot be
        opened or the filesystem knows no locks.

        The lock is on the file that `path` names at the end: not on one that was removed meanwhile.
        """
        end = time.monotonic() + wait_s
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        while True:
            flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
            lock = cls(path, descriptor)
            try:
                fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                if lock.is_of_path():
                    return lock
            except BlockingIOError:
                pass
            except BaseException:
                lock.release()
                raise
            lock.release()
            if time.monotonic() >= end:
                return None
            time.sleep(POLL_S)

    def is_of_path(self) -> bool:
        """Whether the path still names the file that is locked."""
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False
        held = os.fstat(self.descriptor)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold the exclusive lock inside. Raises `TimeoutError` when others hold it longer."""
    lock = FileLock.acquire(path, wait_s=wait_s)
    if lock is None:
        raise TimeoutError(f"{path} is still locked after {wait_s:g} s")
    try:
        yield
    finally:
        lock.release()
