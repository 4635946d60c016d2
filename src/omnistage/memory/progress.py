"""Turns bytes loaded into reports."""

from __future__ import annotations

from omnistage.contracts.runtime import LoadReporter


class Progress:
    """Tells a reporter the note and the fraction of all bytes, at most once a percent."""

    def __init__(self, total_bytes: int, report: LoadReporter) -> None:
        self._total_bytes, self._report = max(total_bytes, 1), report
        self._done_bytes, self._percent, self._note = 0, -1, ""

    def begin(self, note: str) -> None:
        self._note, self._percent = note, -1
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        fraction = min(self._done_bytes / self._total_bytes, 1.0)
        if int(fraction * 100) != self._percent:
            self._percent = int(fraction * 100)
            self._report(self._note, fraction)
