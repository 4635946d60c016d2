"""Who runs, who waits, and for whom the executor keeps a device row."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field

from omnistage.ar.sequence import Phase, TokenSequence


def _order(sequence: TokenSequence) -> tuple[int, int]:
    return sequence.order


@dataclass(slots=True)
class Places:
    """At most `capacity` sequences have a place, from the step that begins them until they are
    gone: also while they are preempted, or finished with output that nobody has taken."""

    capacity: int
    running: list[TokenSequence] = field(default_factory=list)
    """Best first, as are those that wait."""
    _new: list[TokenSequence] = field(default_factory=list)
    _placed: list[TokenSequence] = field(default_factory=list)
    """Those that wait with a place of their own."""
    _taken: int = 0

    @property
    def num_waiting(self) -> int:
        return len(self._new) + len(self._placed)

    def wait(self, sequence: TokenSequence) -> None:
        """It waits for its turn, without running any more if it did."""
        self.withdraw(sequence)
        sequence.phase = Phase.WAITING
        insort(self._placed if sequence.placed else self._new, sequence, key=_order)

    def next_waiting(self, past: Collection[TokenSequence] = ()) -> TokenSequence | None:
        """The best one that can have a place, looking past some."""
        lists = [self._placed, self._new] if self._taken < self.capacity else [self._placed]
        heads = (next((one for one in known if one not in past), None) for known in lists)
        return min((one for one in heads if one is not None), key=_order, default=None)

    def run(self, sequence: TokenSequence) -> None:
        self.withdraw(sequence)
        sequence.phase = Phase.RUNNING
        insort(self.running, sequence, key=_order)
        if not sequence.placed:
            sequence.placed = True
            self._taken += 1

    def withdraw(self, sequence: TokenSequence) -> None:
        """Out of the list that it is in; it keeps its place."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            (self._placed if sequence.placed else self._new).remove(sequence)

    def leave(self, sequence: TokenSequence) -> None:
        """The executor forgets it."""
        if sequence.placed:
            sequence.placed = False
            self._taken -= 1
