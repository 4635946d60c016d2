"""What running out of memory has taught about the size of batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class BatchLimits:
    """By kind of work and shape, the most requests that one command may hold: half of what did
    not fit.

    A limit is lifted when nobody of its shape is here any more: by then the memory that was short
    may be free, and shapes come without end. A shape that comes back pays at most log2 of the batch
    size in failed commands to learn it again; one that stays never pays twice.
    """

    largest: int
    _learnt: dict[tuple[str, Hashable], int] = field(default_factory=dict)

    def of(self, kind: str, shape: Hashable) -> int:
        return self._learnt.get((kind, shape), self.largest)

    def did_not_fit(self, kind: str, shape: Hashable, size: int) -> None:
        """`size` requests ran out of memory together."""
        self._learnt[kind, shape] = max(1, min(size // 2, self.of(kind, shape)))

    def keep(self, shapes: Iterable[Hashable]) -> None:
        """Forget what is known of all other shapes."""
        if self._learnt:
            present = set(shapes)
            self._learnt = {at: size for at, size in self._learnt.items() if at[1] in present}
