"""What a block holds when it is compiled: neighbouring pointwise operations become one kernel.

Only what a matrix product, an attention or a convolution reads or makes, and what leaves the block,
lies in memory. All else is computed where it is needed, from what lies in memory, which lives until
then; a kernel writes over an input that nobody needs any more. So torch's inductor does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST_READS = 4
"""What would be computed more than once from more than this many tensors is kept instead
(inductor's `realize_reads_threshold`)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation. Storages are numbers; `writes` has their bytes as well. `is_pointwise`: it can
    be fused. `moved` are those of `reads` whose elements end up at other places (parts, joined or
    repeated tensors), so that no kernel may write over them. `borrowed_bytes` it takes while it
    runs."""

    is_pointwise: bool
    reads: frozenset[int]
    writes: tuple[tuple[int, int], ...]
    moved: frozenset[int] = frozenset()
    borrowed_bytes: int = 0


def fused_peak_bytes(steps: Sequence[Step], leaving: Collection[int]) -> int:
    """The highest use of what these steps make; `leaving` is alive at their end."""
    return _Block(steps, set(leaving)).peak_bytes()


class _Block:
    def __init__(self, steps: Sequence[Step], leaving: set[int]) -> None:
        self._steps = steps
        self._leaving = leaving
        self._nbytes: dict[int, int] = {}
        self._makers: dict[int, list[int]] = defaultdict(list)
        self._readers: dict[int, list[int]] = defaultdict(list)
        for place, step in enumerate(steps):
            for storage, nbytes in step.writes:
                self._nbytes[storage] = nbytes
                self._makers[storage].append(place)
            for storage in step.reads:
                self._readers[storage].append(place)
        self._sources: dict[int, frozenset[int]] = {}
        self._moved: dict[int, frozenset[int]] = {}
        self._written_from: dict[int, frozenset[int]] = {}
        self._kept = self._find_kept()
        self._last_use = self._find_last_uses()

    def peak_bytes(self) -> int:
        live = peak = 0
        for place, step in enumerate(self._steps):
            free = self._last_used_at(place)
            for storage, nbytes in step.writes:
                if storage not in self._kept or self._makers[storage][0] != place:
                    continue
                over = next((one for one in free if self._gives_way(one, storage, nbytes)), None)
                if step.is_pointwise and over is not None:
                    free.remove(over)
                else:
                    live += nbytes
            peak = max(peak, live + step.borrowed_bytes)
            live -= sum(self._nbytes[one] for one in free)
        return peak

    def _find_kept(self) -> set[int]:
        """In the order of their making, so that the sources of each are known."""
        kept: set[int] = set()
        for storage in sorted(self._makers, key=lambda one: self._makers[one][-1]):
            fused = all(self._steps[place].is_pointwise for place in self._makers[storage])
            readers = [p for p in self._readers[storage] if p not in self._makers[storage]]
            needed = any(not self._steps[place].is_pointwise for place in readers)
            sources, moved = self._sources_of(storage), self._moved_for(storage)
            costly = len(readers) > 1 and len(sources) > MOST_READS
            if not fused or needed or costly or storage in self._leaving:
                kept.add(storage)
                self._sources[storage] = frozenset((storage,))
                self._written_from[storage] = moved
            else:
                self._sources[storage], self._moved[storage] = sources, moved
        return kept

    def _sources_of(self, storage: int) -> frozenset[int]:
        """The storages in memory that it is computed from, those from outside among them."""
        reads = {one for place in self._makers[storage] for one in self._steps[place].reads}
        found = [self._sources.get(one, frozenset((one,))) for one in reads - {storage}]
        return frozenset().union(*found)

    def _moved_for(self, storage: int) -> frozenset[int]:
        """Those of its sources whose elements end up at other places."""
        found: set[int] = set()
        for place in self._makers[storage]:
            step = self._steps[place]
            for read in step.reads - {storage}:
                if read in step.moved:
                    found |= self._sources.get(read, frozenset((read,)))
                found |= self._moved.get(read, frozenset())
        return frozenset(found)

    def _gives_way(self, freed: int, storage: int, nbytes: int) -> bool:
        return self._nbytes[freed] == nbytes and freed not in self._written_from[storage]

    def _find_last_uses(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for place, step in enumerate(self._steps):
            writes_memory = any(one in self._kept for one, _ in step.writes)
            if step.is_pointwise and not writes_memory:
                continue
            for read in step.reads:
                for source in self._sources.get(read, frozenset((read,))):
                    last[source] = place
        return last

    def _last_used_at(self, place: int) -> list[int]:
        return [
            one
            for one in sorted(self._kept - self._leaving)
            if max(self._last_use.get(one, 0), self._makers[one][-1]) == place
        ]
