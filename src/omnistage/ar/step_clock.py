"""How long a device stands still between two steps: what is left of the host on the decode path."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from omnistage.platforms.registry import platform_of

KEPT = 256
"""Steps whose gaps are remembered."""


class StepClock:
    """Marks the begin and the end of each step on the device's own clock.

    A gap counts only where both steps were given without a pause: a stage that has nothing to do is
    not slow. Used by the executing thread.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._platform = platform_of(device)
        self._gaps_ms: deque[float] = deque(maxlen=KEPT)
        self._steps_ms: deque[float] = deque(maxlen=KEPT)
        self._open: deque[tuple[Any, Any, Any]] = deque()
        self._last_end: Any = None

    def begin(self) -> Any:
        """A mark before a step's first work."""
        return self._mark()

    def end(self, begin: Any, *, follows: bool) -> None:
        """The step that began at `begin` is given. `follows`: right after the one before."""
        end = self._mark()
        self._open.append((self._last_end if follows else None, begin, end))
        self._last_end = end
        while self._open and self._open[0][2].query():
            before, started, ended = self._open.popleft()
            self._steps_ms.append(started.elapsed_time(ended))
            if before is not None:
                self._gaps_ms.append(before.elapsed_time(started))

    def describe(self) -> dict[str, float]:
        """Medians over the latest steps, in microseconds; nothing before the first."""
        found = {}
        if self._steps_ms:
            found["step_us"] = round(statistics.median(self._steps_ms) * 1e3, 1)
        if self._gaps_ms:
            found["step_gap_us"] = round(statistics.median(self._gaps_ms) * 1e3, 1)
        return found

    def _mark(self) -> Any:
        event = self._platform.event(self._device, timing=True)
        event.record()
        return event
