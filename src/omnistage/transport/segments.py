"""Anonymous shared memory: sealed memory files that live as long as somebody holds them.

A segment has no name in any file system, so whichever process dies, the kernel frees it with the
last descriptor or mapping. Sealing (memfd_create(2), F_ADD_SEALS) forbids every later change of
size or content: a mapping can neither fault nor be overwritten.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omnistage.contracts.errors import (
    OmniError,
    OutOfMemoryError,
    ProtocolError,
    StageLostError,
    UnavailableError,
)
from omnistage.contracts.payloads import SharedSegment
from omnistage.transport.sockets import new_token

ALIGNMENT_BYTES = 64
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def shared_memory_usable() -> bool:
    """Whether this kernel can seal memory files and open them through /proc."""
    if sys.platform != "linux":
        return False
    probe = b"omnistage"
    try:
        fd, token = write_segment([memoryview(probe)], [0], len(probe))
    except OSError:
        return False
    try:
        segment = SharedSegment(os.getpid(), fd, token, 0)
        return bytes(SegmentReader().read(segment, len(probe))) == probe
    except OmniError:
        return False
    finally:
        os.close(fd)


def write_segment(
    buffers: Sequence[memoryview], offsets_bytes: Sequence[int], size_bytes: int
) -> tuple[int, str]:
    """Fill a new segment and seal it. Returns (descriptor, token); the caller closes the first."""
    token = new_token()
    fd = os.memfd_create(f"omnistage-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        for buffer, offset in zip(buffers, offsets_bytes, strict=True):
            _write_all(fd, buffer, offset)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _all_seals())
    except BaseException:
        os.close(fd)
        raise
    return fd, token


def _write_all(fd: int, buffer: memoryview, offset_bytes: int) -> None:
    done = 0
    while done < buffer.nbytes:
        done += os.pwrite(fd, buffer[done:], offset_bytes + done)


def _all_seals() -> int:
    return fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@contextmanager
def host_limits() -> Iterator[None]:
    """Turn "no memory" and "no descriptors" of the operating system into our errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise OutOfMemoryError(
                "the host has no memory left for data between stages; send less at once",
                detail=str(error),
            ) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise UnavailableError(
                "too many open files for data between stages; raise the limit (ulimit -n) or use "
                "the connector 'inline'",
                detail=str(error),
            ) from error
        raise


class SegmentReader:
    """Maps the segments of one payload, each once."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int, str], mmap.mmap] = {}

    def read(self, segment: SharedSegment, nbytes: int) -> memoryview:
        """A read-only view of `nbytes` at the segment's offset. It keeps its mapping alive.

        Raises `StageLostError` when the producer is gone and `ProtocolError` when the descriptor
        is another file than the token says, or too small.
        """
        key = (segment.pid, segment.fd, segment.token)
        if key not in self._mapped:
            self._mapped[key] = _map(segment)
        mapping = self._mapped[key]
        end = segment.offset + nbytes
        if segment.offset < 0 or end > len(mapping):
            raise ProtocolError(
                f"{_name(segment)} has {len(mapping)} bytes; {segment.offset} to {end} were asked"
            )
        return memoryview(mapping)[segment.offset : end]


def _map(segment: SharedSegment) -> mmap.mmap:
    if sys.platform != "linux":
        raise ProtocolError("shared segments exist on Linux only; use the connector 'inline'")
    fd = _open(segment)
    try:
        size_bytes = os.fstat(fd).st_size
        if not size_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _all_seals():
            raise ProtocolError(f"{_name(segment)} is empty or not sealed")
        with host_limits():
            return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _open(segment: SharedSegment) -> int:
    """A descriptor of our own. The name is checked before, so that nothing strange is opened, and
    after, because the number may have been reused in between."""
    path = f"/proc/{segment.pid}/fd/{segment.fd}"
    try:
        _check_token(path, segment)
        with host_limits():
            fd = os.open(path, _READ_FLAGS)
    except OSError as error:
        raise _unreachable(segment, error) from error
    try:
        _check_token(f"/proc/self/fd/{fd}", segment)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_token(path: str, segment: SharedSegment) -> None:
    if os.readlink(path) != f"/memfd:omnistage-{segment.token} (deleted)":
        raise ProtocolError(
            f"{_name(segment)} is not what was sent: its token differs (released too early?)"
        )


def _unreachable(segment: SharedSegment, error: OSError) -> OmniError:
    """A dying process loses its descriptors before it looks dead, so a missing one means loss."""
    if isinstance(error, FileNotFoundError | ProcessLookupError):
        return StageLostError(
            "the stage that made this data died, or took its output back, before it was read; "
            "please retry",
            detail=f"process {segment.pid}: {error}",
        )
    if isinstance(error, PermissionError):
        return ProtocolError(
            f"no permission to read {_name(segment)}; stages must run as the same user, or use "
            "the connector 'inline'"
        )
    return ProtocolError(f"{_name(segment)} cannot be opened: {error.strerror}")


def _name(segment: SharedSegment) -> str:
    return f"shared segment (process {segment.pid}, descriptor {segment.fd})"
