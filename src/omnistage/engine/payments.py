"""Who still has to take an output. When all have, its producer may free it and gets a credit."""

from __future__ import annotations

import time

from omnistage.contracts.messages import Acknowledge, Output
from omnistage.engine.request_state import Child, UnpaidOutput
from omnistage.stages.supervisor import StageSupervisor


class Payments:
    """Used by the orchestrator's loop only."""

    def __init__(self, supervisor: StageSupervisor) -> None:
        self._supervisor = supervisor

    def owe(self, child: Child, output: Output, takers: int) -> None:
        """`takers` have to take this output; with none it is dropped and acknowledged at once."""
        visit = child.visits[output.stage_id]
        visit.unpaid[output.sequence] = UnpaidOutput(
            takers=takers, tx_s=output.tx_s, routed_at=time.monotonic()
        )
        if takers == 0:
            self._acknowledge(child, output.stage_id, output.sequence)

    def pay(self, child: Child, stage_id: int, sequence: int) -> UnpaidOutput | None:
        """One of the takers of this output has it."""
        unpaid = child.visits[stage_id].unpaid.get(sequence)
        if unpaid is None:
            return None
        unpaid.takers -= 1
        if unpaid.takers == 0:
            self._acknowledge(child, stage_id, sequence)
        return unpaid

    def pay_all(self, child: Child) -> None:
        """The request ended well: whatever is still unpaid has been taken."""
        for stage_id, visit in child.visits.items():
            for sequence in list(visit.unpaid):
                self._acknowledge(child, stage_id, sequence)

    def _acknowledge(self, child: Child, stage_id: int, sequence: int) -> None:
        del child.visits[stage_id].unpaid[sequence]
        replica = self._supervisor.pools[stage_id].binding(child.key)
        if replica is not None:
            message = Acknowledge(identity=child.identity, sequence=sequence)
            self._supervisor.send(replica, message)
