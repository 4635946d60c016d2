"""What an executing thread is doing, since when, and by when it must be done."""

from __future__ import annotations

import time

from omnistage.contracts.messages import Operation


class OperationClock:
    """Written by one executing thread, read by the process's own thread.

    Each kind of operation has its own limit: compiling may take minutes, a step may not.
    """

    def __init__(self, limits_s: dict[str, float]) -> None:
        self._limits_s = limits_s
        self._current: tuple[str, float] | None = None

    def begin(self, kind: str) -> None:
        self._current = (kind, time.monotonic())

    def touch(self) -> None:
        """The operation goes on and has just shown life."""
        if self._current is not None:
            self.begin(self._current[0])

    def idle(self) -> None:
        self._current = None

    def limit_s(self, kind: str) -> float:
        return self._limits_s.get(kind, self._limits_s["forward"])

    @property
    def longest_limit_s(self) -> float:
        return max(self._limits_s.values())

    def snapshot(self) -> Operation | None:
        current = self._current
        if current is None:
            return None
        kind, started = current
        return Operation(
            kind=kind, elapsed_s=time.monotonic() - started, limit_s=self.limit_s(kind)
        )
