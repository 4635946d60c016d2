"""One answer for ranks whose work is collective: go on, or stop together."""

from __future__ import annotations

from datetime import timedelta
from enum import IntEnum

from omnistage.parallel.failures import is_collective_fault, lost_rank
from omnistage.parallel.groups import ProcessGroups


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
        import torch
        import torch.distributed as dist

        votes = torch.tensor([own, -own])
        try:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            if limit_s is not None:
                options.timeout = timedelta(seconds=limit_s)
            self._group.allreduce([votes], options).wait()
        except RuntimeError as error:
            if is_collective_fault(error):
                raise lost_rank(error) from None
            raise
        greatest, least = votes.tolist()
        return Vote(-least), Vote(greatest)
