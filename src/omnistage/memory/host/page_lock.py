"""Page-locking of host memory: all that is asked for or nothing, within a limit, and undone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import StageLostError
from omnistage.memory.host.mapping import PAGE_BYTES, HostMemory
from omnistage.memory.plan import gib
from omnistage.platforms.base import PageLockError

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import Platform

logger = logging.getLogger(__name__)

_LOCKED_FOR_GOOD: list[Any] = []
"""Mappings whose pages could not be unlocked: unmapped, a device might read what follows there."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageRange:
    """Whole pages of one memory, by address."""

    memory: HostMemory
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def pages_of(memory: HostMemory, parts: Iterable[torch.Tensor]) -> list[PageRange]:
    """The pages that these parts of a memory touch: by address, those that overlap or adjoin as one
    range."""
    ends: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda part: part.data_ptr()):
        start = part.data_ptr() // PAGE_BYTES * PAGE_BYTES
        stop = -(-(part.data_ptr() + part.nbytes) // PAGE_BYTES) * PAGE_BYTES
        if ends and start <= ends[-1][1]:
            ends[-1] = (ends[-1][0], max(stop, ends[-1][1]))
        elif part.nbytes:
            ends.append((start, stop))
    return [PageRange(memory=memory, start=start, stop=stop) for start, stop in ends]


class PageLocks:
    """Ranges that are locked, until `release`."""

    def __init__(self, platform: Platform, device: str) -> None:
        self._platform = platform
        self._device = device
        self._locked: list[PageRange] = []

    @classmethod
    def acquire(
        cls, ranges: Sequence[PageRange], platform: Platform, device: str, limit_bytes: int | None
    ) -> PageLocks | None:
        """Lock all; None, with nothing locked, when they are more than `limit_bytes` or the system
        refuses one. Raises `StageLostError` when those before a refusal cannot be unlocked."""
        needed_bytes = sum(one.nbytes for one in ranges)
        if limit_bytes is not None and needed_bytes > limit_bytes:
            logger.info(
                "not page-locked: %s are needed, %s allowed", gib(needed_bytes), gib(limit_bytes)
            )
            return None
        locks = cls(platform, device)
        try:
            for one in ranges:
                locks._lock(one)
        except PageLockError as error:
            logger.warning("not page-locked (%s of it): %s", gib(needed_bytes), error)
            locks.release()
            return None
        except BaseException:
            locks.release()
            raise
        return locks

    @property
    def locked_bytes(self) -> int:
        return sum(one.nbytes for one in self._locked)

    def release(self) -> None:
        """Unlock, the last first. Idempotent. Raises `StageLostError` when the system refuses; then
        the memory concerned stays mapped until the process ends."""
        failures: list[PageLockError] = []
        while self._locked:
            one = self._locked.pop()
            try:
                self._platform.unlock_pages(one.start, self._device)
            except PageLockError as error:
                _LOCKED_FOR_GOOD.append(one.memory.mapping)
                failures.append(error)
        if failures:
            raise StageLostError(
                f"{len(failures)} page-locked range(s) cannot be unlocked; the stage must be "
                "started again",
                detail=str(failures[0]),
            ) from failures[0]

    def _lock(self, one: PageRange) -> None:
        read_only = one.memory.read_only
        self._platform.lock_pages(one.start, one.nbytes, self._device, read_only=read_only)
        self._locked.append(one)
