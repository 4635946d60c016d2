"""How long passes take whose blocks partly stream: the ring of two slots, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WARM_PASSES = 2
"""After these a pass begins as every later one does, with its first blocks fetched."""


@dataclass(frozen=True, kw_only=True)
class TimedBlock:
    """`copy_s` 0: it does not stream."""

    compute_s: float
    copy_s: float = 0.0


def pass_time_s(blocks: Sequence[TimedBlock], rest_s: float = 0.0) -> float:
    """One pass of many, `rest_s` being the work outside of blocks, in front of them."""
    ends_s = _ends_s(blocks, rest_s, WARM_PASSES + 1)
    return ends_s[-1] - ends_s[-2]


def cold_time_s(blocks: Sequence[TimedBlock], rest_s: float, passes: int) -> float:
    """The first passes of a component, the slots having been another's."""
    return _ends_s(blocks, rest_s, passes)[-1]


def _ends_s(blocks: Sequence[TimedBlock], rest_s: float, passes: int) -> list[float]:
    """A copy starts when the one before it is done and the block that used its slot, the streamed
    one two back, has been computed; a block starts when the one before it is done and its own copy
    is. The very first copy is started by its own block."""
    computed_s = 0.0
    copied_s: float | None = None
    slots_free_s = [0.0, 0.0]
    ends_s = []
    for _ in range(passes):
        computed_s += rest_s
        for block in blocks:
            start_s = computed_s
            if block.copy_s:
                before_s = computed_s if copied_s is None else copied_s
                copied_s = max(before_s, slots_free_s[0]) + block.copy_s
                start_s = max(start_s, copied_s)
            computed_s = start_s + block.compute_s
            if block.copy_s:
                slots_free_s = [slots_free_s[1], computed_s]
        ends_s.append(computed_s)
    return ends_s
