"""How a listener hears a sound that arrives in pieces."""

from __future__ import annotations


class PlaybackClock:
    """A player that starts with the first piece and stands still whenever nothing is left."""

    def __init__(self) -> None:
        self.duration_s = 0.0
        self.underrun_s = 0.0
        """How long it has stood still so far, in all."""
        self.pieces = 0
        self._runs_dry_at_s: float | None = None

    def arrive(self, now_s: float, piece_s: float) -> None:
        """A piece of `piece_s` seconds is here at `now_s` of a monotonic clock."""
        if piece_s <= 0:
            return
        if self._runs_dry_at_s is None:
            self._runs_dry_at_s = now_s
        self.underrun_s += max(0.0, now_s - self._runs_dry_at_s)
        self._runs_dry_at_s = max(now_s, self._runs_dry_at_s) + piece_s
        self.duration_s += piece_s
        self.pieces += 1
