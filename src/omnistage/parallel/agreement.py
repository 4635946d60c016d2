"""One answer for ranks whose work is collective: go on, or stop together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING

from omnistage.parallel.failures import is_collective_fault, lost_rank
from omnistage.parallel.groups import WORLD, ProcessGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Vote(IntEnum):
    """What a rank says of its own work; of several the greatest counts. `DONE`: it has no further
    step. `FAILED`: it cannot go on."""

    GO_ON = 0
    DONE = 1
    STOP = 2
    FAILED = 3


class Agreement:
    """The ranks of one group vote, all equally often, between the collectives of their work."""

    def __init__(self, groups: ProcessGroups, name: str) -> None:
        self.timeout_s = groups.timeout_s
        self._group = groups.control_group_of(name)

    def vote(self, own: Vote, limit_s: float | None = None) -> tuple[Vote, Vote]:
        """(least, greatest) vote of all ranks. Raises `StageLostError` when a rank does not vote
        within `limit_s` (None: the deadline of the groups)."""
        greatest, least = _greatest(self._group, [own, -own], limit_s)
        return Vote(-least), Vote(greatest)


def least_of_all(groups: ProcessGroups, *values: int) -> tuple[int, ...]:
    """The least of each value over all ranks of the replica, which all ask while they load. Raises
    `StageLostError` when one does not."""
    group = groups.control_group_of(WORLD)
    found = _greatest(group, [-value for value in values], groups.join_timeout_s)
    return tuple(-value for value in found)


def _greatest(group: ProcessGroup, values: Sequence[int], limit_s: float | None) -> list[int]:
    import torch
    import torch.distributed as dist

    shared = torch.tensor(values, dtype=torch.int64)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    if limit_s is not None:
        options.timeout = timedelta(seconds=limit_s)
    try:
        group.allreduce([shared], options).wait()
    except RuntimeError as error:
        if is_collective_fault(error):
            raise lost_rank(error) from None
        raise
    return [int(value) for value in shared]
