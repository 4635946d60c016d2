"""The lanes of `ExecutionContext.finish_later`: one worker each, addressed as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from omnistage.contracts.errors import OmniError, StageLostError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import INPUT_LANE, LANES, OUTPUT_LANE
from omnistage.stages.output_worker import CAPACITY, LIMIT_KINDS, LateOutput, OutputWorker, Work

OUTPUTS_PER_SEQUENCE = 8
INPUT_CAPACITY = 65_536
"""Inputs wait in the scheduler's own bounded queue; here they must not hold up a step."""


class LateLanes:
    """Used as an `OutputWorker` is; a work's lane is its own."""

    def __init__(
        self,
        stage_name: str,
        stage_id: int,
        replica_id: int,
        *,
        limit_s: Callable[[str], float],
        max_num_seqs: int,
        on_outcome: Callable[[LateOutput], None],
        on_stall: Callable[[StageLostError], None],
    ) -> None:
        """`limit_s` says the limit of an operation. A step may give one output a sequence, so as
        many times `OUTPUTS_PER_SEQUENCE` may wait before a step does."""
        capacities = {
            OUTPUT_LANE: max(CAPACITY, OUTPUTS_PER_SEQUENCE * max_num_seqs),
            INPUT_LANE: INPUT_CAPACITY,
        }
        self._workers = {
            lane: OutputWorker(
                stage_name,
                stage_id,
                replica_id,
                limit_s=limit_s(LIMIT_KINDS[lane]),
                on_outcome=on_outcome,
                on_stall=on_stall,
                capacity=capacities[lane],
                lane=lane,
            )
            for lane in LANES
        }

    @property
    def num_pending(self) -> int:
        return sum(worker.num_pending for worker in self._workers.values())

    def submit(self, identity: RequestIdentity, work: Work, lane: str) -> LateOutput:
        return self._workers[lane].submit(identity, work)

    def take(self, late: LateOutput) -> StageData | OmniError | None:
        return self._workers[late.lane].take(late)

    def withdraw(self, key: RequestKey) -> None:
        for worker in self._workers.values():
            worker.withdraw(key)

    def withdraw_each(self, lates: Iterable[LateOutput]) -> None:
        lates = list(lates)
        for lane, worker in self._workers.items():
            worker.withdraw_each(late for late in lates if late.lane == lane)

    def drain_outputs(self, limit_s: float) -> bool:
        """See `OutputWorker.drain`. What makes inputs ready reads nothing that a call may free."""
        return self._workers[OUTPUT_LANE].drain(limit_s)

    def close(self, limit_s: float) -> None:
        """Within `limit_s` seconds for all lanes together."""
        self.end_waits()
        give_up_s = time.monotonic() + limit_s
        for worker in self._workers.values():
            worker.close(max(0.0, give_up_s - time.monotonic()))

    def end_waits(self) -> None:
        for worker in self._workers.values():
            worker.end_waits()
