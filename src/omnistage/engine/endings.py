"""How a request ends, exactly once: finished, cancelled or failed; then released everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from omnistage.config.resolved import EngineLimits
from omnistage.contracts.errors import InternalError, OmniError, RequestCancelledError
from omnistage.contracts.identity import RequestKey
from omnistage.contracts.messages import Abort
from omnistage.contracts.outputs import FinishReason
from omnistage.engine.entry import Entry
from omnistage.engine.payments import Payments
from omnistage.engine.request_state import Child, Phase, RequestState
from omnistage.engine.request_table import RequestTable
from omnistage.observability.logging import get_logger
from omnistage.observability.metrics import EngineMetrics
from omnistage.stages.supervisor import StageSupervisor

logger = get_logger(__name__)

Later = Callable[[RequestState, float, Callable[[], None]], None]
"""Arranges for a call on the orchestrator's loop, unless the request is released before."""


class Endings:
    """Used by the orchestrator's loop only."""

    def __init__(
        self,
        limits: EngineLimits,
        table: RequestTable,
        supervisor: StageSupervisor,
        entry: Entry,
        payments: Payments,
        metrics: EngineMetrics,
        later: Later,
    ) -> None:
        self._limits = limits
        self._table = table
        self._supervisor = supervisor
        self._entry = entry
        self._payments = payments
        self._metrics = metrics
        self._later = later

    def finish(self, state: RequestState, reason: FinishReason) -> None:
        """Every needed output has been made and is in the caller's stream."""
        self._metrics.request_finished(reason, time.monotonic() - state.created_at)
        self._leave_active(state)
        for child in state.children.values():
            self._payments.pay_all(child)
        self.release(state)

    def fail(self, state: RequestState, error: OmniError) -> None:
        """End a request: tell its caller, stop it at every stage, free it there."""
        if not state.active:
            return
        state.error = error
        self._leave_active(state)
        if not state.stream.finished:
            state.stream.fail(error)
        elapsed_s = time.monotonic() - state.created_at
        if isinstance(error, RequestCancelledError):
            self._metrics.request_finished(FinishReason.ABORT, elapsed_s)
        else:
            self._metrics.request_failed(error.type, elapsed_s)
        _log_failure(state, error)
        for child in state.children.values():
            child.waiting.clear()
            self._abort_child(state, child, error.type)
        if state.pending_aborts:
            self._later(state, self._limits.abort_timeout_s, lambda: self._give_up_abort(state))
        else:
            self.release(state)

    def aborted(self, state: RequestState, key: RequestKey, stage_id: int) -> None:
        """Nothing of this child is left at this stage."""
        state.pending_aborts.discard((key, stage_id))
        if not state.active and not state.pending_aborts:
            self.release(state)

    def release(self, state: RequestState) -> None:
        """Forget a request that nobody holds any more."""
        if not self._table.remove(state):
            return
        state.cancel_timers()
        for child in state.children.values():
            self._entry.forget(child)
            for pool in self._supervisor.pools:
                pool.unbind(child.key)
        state.released.set()

    def _leave_active(self, state: RequestState) -> None:
        state.phase = Phase.ENDED
        state.cancel_timers()
        state.joins.clear()
        state.return_input_credit()

    def _abort_child(self, state: RequestState, child: Child, reason: str) -> None:
        for stage_id, visit in child.visits.items():
            replica = self._supervisor.pools[stage_id].binding(child.key)
            if replica is not None and visit.submitted and not visit.is_paid:
                state.pending_aborts.add((child.key, stage_id))
                self._supervisor.send(replica, Abort(identity=child.identity, reason=reason))

    def _give_up_abort(self, state: RequestState) -> None:
        logger.error(
            "stages %s did not confirm the abort of %s within %g s",
            sorted({stage_id for _, stage_id in state.pending_aborts}),
            state.request_id,
            self._limits.abort_timeout_s,
        )
        state.unconfirmed = True
        self.release(state)


def _log_failure(state: RequestState, error: OmniError) -> None:
    level = logger.error if error.status >= 500 else logger.info
    level("request %s failed: %s: %s", state.request_id, error.type, error)
    if isinstance(error, InternalError) and error.detail:
        logger.error("%s", error.detail)
