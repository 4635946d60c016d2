"""How long a pass takes whose blocks partly stream: the ring of two slots, on paper."""

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
    """One pass of many, `rest_s` being the work outside of blocks, in front of them.

    A copy starts when the one before it is done and the block that used its slot, the streamed one
    two back, has been computed; a block starts when the one before it is done and its own copy is.
    """
    computed_s = copied_s = 0.0
    slots_free_s = [0.0, 0.0]
    ends_s = []
    for _ in range(WARM_PASSES + 1):
        computed_s += rest_s
        for block in blocks:
            start_s = computed_s
            if block.copy_s:
                copied_s = max(copied_s, slots_free_s[0]) + block.copy_s
                start_s = max(start_s, copied_s)
            computed_s = start_s + block.compute_s
            if block.copy_s:
                slots_free_s = [slots_free_s[1], computed_s]
        ends_s.append(computed_s)
    return ends_s[-1] - ends_s[-2]
