"""Which blocks stay on the device when some must stream.

Copies and computation overlap only if copies come evenly: a long run of streamed blocks leaves the
device waiting, a long run of resident ones leaves the link idle. So resident blocks are spread.
The blocks form a circle, for after the last one comes the first one of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence


def interleaved_residents(sizes_bytes: Sequence[int], budget_bytes: int) -> tuple[int, ...]:
    """Indices of resident blocks, ascending: at most `budget_bytes` of them, and no further one
    fits; the largest run of streamed bytes between residents is small, and the rest is even."""
    if sum(sizes_bytes) <= budget_bytes:
        return tuple(range(len(sizes_bytes)))
    spread = _filled(sizes_bytes, _evenly(sizes_bytes, budget_bytes), budget_bytes)
    usable_bytes = sum(sizes_bytes[index] for index in spread)
    again = _evenly(sizes_bytes, usable_bytes)
    short = _shortest_runs(sizes_bytes, budget_bytes)
    candidates = [spread, *(_filled(sizes_bytes, one, budget_bytes) for one in (again, short))]
    return tuple(sorted(min(candidates, key=lambda chosen: _badness(sizes_bytes, chosen))))


def leading_residents(block_count: int, resident_count: int) -> tuple[int, ...]:
    """The first blocks."""
    return tuple(range(min(block_count, max(0, resident_count))))


def largest_streamed_run_bytes(sizes_bytes: Sequence[int], residents: Sequence[int]) -> int:
    """Of blocks that follow each other and all stream, the last and the first being neighbours."""
    if not residents:
        return sum(sizes_bytes)
    chosen, start = set(residents), min(residents)
    largest = run = 0
    for index in _circle(len(sizes_bytes), start):
        run = 0 if index in chosen else run + sizes_bytes[index]
        largest = max(largest, run)
    return largest


def _circle(count: int, start: int) -> list[int]:
    return [*range(start, count), *range(start)]


def _badness(sizes_bytes: Sequence[int], chosen: set[int]) -> tuple[int, float]:
    return largest_streamed_run_bytes(sizes_bytes, tuple(chosen)), _lag_bytes(sizes_bytes, chosen)


def _lag_bytes(sizes_bytes: Sequence[int], chosen: set[int]) -> float:
    """By how much, at the worst, streamed bytes run ahead of their even share on any stretch."""
    total = sum(sizes_bytes)
    share = 1 - sum(sizes_bytes[index] for index in chosen) / total
    lag = highest = lowest = 0.0
    for index, size in enumerate(sizes_bytes):
        lag += (0 if index in chosen else size) - share * size
        highest, lowest = max(highest, lag), min(lowest, lag)
    return highest - lowest


def _evenly(sizes_bytes: Sequence[int], budget_bytes: int) -> set[int]:
    """By the rule that draws a straight line on a grid."""
    share = budget_bytes / sum(sizes_bytes)
    chosen: set[int] = set()
    passed = kept = 0
    for index, size in enumerate(sizes_bytes):
        passed += size
        if kept + size <= min(budget_bytes, share * passed + size / 2):
            chosen.add(index)
            kept += size
    return chosen


def _shortest_runs(sizes_bytes: Sequence[int], budget_bytes: int) -> set[int]:
    """The fewest resident bytes that keep every run within the smallest bound that is in reach."""
    bounds = sorted({*_run_sizes(sizes_bytes)})
    low, high, best = 0, len(bounds) - 1, set[int]()
    while low <= high:
        middle = (low + high) // 2
        chosen = _cheapest(sizes_bytes, bounds[middle])
        if sum(sizes_bytes[index] for index in chosen) <= budget_bytes:
            best, high = chosen, middle - 1
        else:
            low = middle + 1
    return best


def _run_sizes(sizes_bytes: Sequence[int]) -> list[int]:
    sums = [0]
    for start in range(len(sizes_bytes)):
        run = 0
        for index in _circle(len(sizes_bytes), start):
            run += sizes_bytes[index]
            sums.append(run)
    return sums


def _cheapest(sizes_bytes: Sequence[int], bound_bytes: int) -> set[int]:
    """Residents of the fewest bytes such that no run exceeds the bound, over all ways to begin
    the circle: some block of the first run that exceeds the bound is resident."""
    if sum(sizes_bytes) <= bound_bytes:
        return set()
    best: set[int] | None = None
    best_bytes = 0
    run = 0
    for first, size in enumerate(sizes_bytes):
        chosen = _cheapest_from(sizes_bytes, first, bound_bytes)
        cost = sum(sizes_bytes[index] for index in chosen)
        if best is None or cost < best_bytes:
            best, best_bytes = chosen, cost
        run += size
        if run > bound_bytes:
            break
    assert best is not None
    return best


def _cheapest_from(sizes_bytes: Sequence[int], first: int, bound_bytes: int) -> set[int]:
    order = [*_circle(len(sizes_bytes), first), first]
    costs, before = [sizes_bytes[first]], [-1]
    for position in range(1, len(order)):
        run, options = 0, []
        for previous in range(position - 1, -1, -1):
            options.append((costs[previous], previous))
            run += sizes_bytes[order[previous]]
            if run > bound_bytes:
                break
        cost, previous = min(options)
        costs.append(cost + sizes_bytes[order[position]])
        before.append(previous)
    chosen, position = set[int](), len(order) - 1
    while position >= 0:
        chosen.add(order[position])
        position = before[position]
    return chosen


def _filled(sizes_bytes: Sequence[int], chosen: set[int], budget_bytes: int) -> set[int]:
    """With what else fits, each time the block that makes the rest most even."""
    chosen = set(chosen)
    left_bytes = budget_bytes - sum(sizes_bytes[index] for index in chosen)
    while True:
        fitting = [
            index
            for index, size in enumerate(sizes_bytes)
            if index not in chosen and size <= left_bytes
        ]
        if not fitting:
            return chosen
        added = min(fitting, key=lambda index: (*_badness(sizes_bytes, {*chosen, index}), index))
        chosen.add(added)
        left_bytes -= sizes_bytes[added]
