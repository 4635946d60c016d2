"""Whose turn it is on a device that several shapes share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class FairShare:
    """Weighted fair queueing (Demers, Keshav, Shenker 1989): every request gets an equal share of
    the device, so a shape's share grows with the number of its requests.

    `_spent` is what each request of a shape has had since the shape came. A shape that comes, or
    comes back, starts at `_time`: what a request that was always here would have had. It owes
    nothing and is owed nothing, and since `_time` moves with all work, nobody who waits is passed
    without end by newcomers.
    """

    _spent: dict[Hashable, float] = field(default_factory=dict)
    _time: float = 0.0

    def next(self, shapes: Mapping[Hashable, int], tie: Callable[[Hashable], Any]) -> Hashable:
        """The shape that has had least; among equals the one with the least `tie`. `shapes` gives
        the number of requests of each shape that could run now."""
        present = {shape: spent for shape, spent in self._spent.items() if shape in shapes}
        self._time = max(self._time, min(present.values(), default=0.0)) if present else 0.0
        self._spent = {shape: present.get(shape, self._time) for shape in shapes}
        return min(shapes, key=lambda shape: (self._spent[shape], tie(shape)))

    def charge(self, shape: Hashable, cost: float, shapes: Mapping[Hashable, int]) -> None:
        """Work that cost `cost` was done for requests of `shape`; `shapes` as for `next`."""
        self._spent[shape] = self._spent.get(shape, self._time) + cost / shapes[shape]
        self._time += cost / sum(shapes.values())
