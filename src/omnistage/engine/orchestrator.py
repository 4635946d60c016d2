"""The orchestrator: one loop that moves every request from stage to stage.

Everything that can happen is an event in one inbox, and every event is handled without waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import (
    DeadlineExceededError,
    OmniError,
    RequestCancelledError,
    SlowClientError,
    StageLostError,
    UnavailableError,
    as_omni_error,
    from_record,
)
from omnistage.contracts.messages import (
    Abort,
    Aborted,
    ControlResult,
    Failed,
    InputConsumed,
    Message,
    Output,
    Progress,
)
from omnistage.contracts.payloads import StageData
from omnistage.engine.calls import ReplicaCalls
from omnistage.engine.client_events import ClientEvents
from omnistage.engine.deliveries import Deliveries
from omnistage.engine.endings import Endings
from omnistage.engine.entry import Entry
from omnistage.engine.payments import Payments
from omnistage.engine.request_state import Child, RequestState
from omnistage.engine.request_table import RequestTable
from omnistage.engine.router import Router
from omnistage.observability.logging import get_logger, request_scope
from omnistage.observability.metrics import EngineMetrics
from omnistage.stages.pool import ReplicaHandle
from omnistage.stages.supervisor import StageSupervisor

logger = get_logger(__name__)

Event = Callable[[], None]


class Orchestrator:
    """Owns the state of all requests. Implements the supervisor's `StageListener`."""

    def __init__(
        self,
        config: OmniConfig,
        metrics: EngineMetrics,
        supervisor: StageSupervisor | None = None,
    ) -> None:
        self._limits = config.limits
        self.supervisor = supervisor or StageSupervisor(config, self, metrics)
        self.table = RequestTable(config.limits, metrics)
        self.calls = ReplicaCalls(self.supervisor)
        self._deliveries = Deliveries(config, self.supervisor)
        self._payments = Payments(self.supervisor)
        self.entry = Entry(config, self._deliveries)
        self._events = ClientEvents(config, self.entry, self._payments, metrics, self._post)
        self._router = Router(
            config,
            self.supervisor,
            metrics,
            self._deliveries,
            self._payments,
            self._events.output,
        )
        self._endings = Endings(
            config.limits,
            self.table,
            self.supervisor,
            self.entry,
            self._payments,
            metrics,
            self._later,
        )
        self._inbox: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # the loop ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="orchestrator")

    async def _run(self) -> None:
        """The orchestrator's one loop."""
        while True:
            while self._inbox:
                event = self._inbox.popleft()
                try:
                    event()
                except Exception:
                    logger.exception("an orchestrator event failed")
            self._arrived.clear()
            await self._arrived.wait()

    def _post(self, event: Event) -> None:
        self._inbox.append(event)
        self._arrived.set()

    def _later(self, state: RequestState, delay_s: float, event: Event) -> None:
        loop = asyncio.get_running_loop()
        state.timers.append(loop.call_later(delay_s, self._post, event))

    async def close(self) -> None:
        """Fail what is active, stop the loop, free what the engine holds. Call it once."""
        error = UnavailableError("the server is shutting down")
        self.table.draining = True
        self.calls.fail(error)
        for state in self.table.all():
            self._endings.fail(state, error)
            self._endings.release(state)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.entry.close()

    # what the engine asks for -----------------------------------------------------------------

    def admit(self, state: RequestState, *, input_complete: bool) -> None:
        """Take a request in, or refuse it at once. Raises as `RequestTable.admit`."""
        self.table.admit(state)
        remaining_s = state.request.identity.remaining_s()
        if remaining_s is not None:
            error = DeadlineExceededError(
                "the request did not finish before its deadline; raise --request-timeout-s or ask "
                "for less"
            )
            self._later(state, remaining_s, lambda: self._endings.fail(state, error))
        self._post_for(state, lambda: self.entry.send(state, None, last=input_complete))

    def append_input(self, state: RequestState, data: StageData, epoch: int) -> None:
        self._post_for(state, lambda: self.entry.send(state, data, last=False, epoch=epoch))

    def end_input(self, state: RequestState, epoch: int) -> None:
        self._post_for(state, lambda: self.entry.end(state, epoch))

    def abort(self, request_id: str, error: OmniError | None = None) -> RequestState | None:
        """Cancel a request everywhere; its `released` event is set when nothing is left of it."""
        state = self.table.get(request_id)
        if state is not None:
            reason = error or RequestCancelledError("the request was cancelled")
            self._post(lambda: self._endings.fail(state, reason))
        return state

    def slow_client(self, request_id: str, full: bool) -> None:
        """The request's stream became full, or no longer is."""
        state = self.table.get(request_id)
        if state is None or not state.active:
            return
        if state.slow_timer is not None:
            state.slow_timer.cancel()
            state.slow_timer = None
        if full:
            timeout_s = self._limits.slow_client_timeout_s
            error = SlowClientError(
                f"the client has not read its stream for {timeout_s:g} s; the request is cancelled"
            )
            state.slow_timer = asyncio.get_running_loop().call_later(
                timeout_s, self._post, lambda: self._endings.fail(state, error)
            )

    # what the supervisor reports --------------------------------------------------------------

    def stage_message(self, message: Message, frames: Sequence[Any]) -> None:
        self._post(lambda: self._on_message(message, frames))

    def replica_ready(self, replica: ReplicaHandle) -> None:
        self._post(lambda: self._on_ready(replica))

    def replica_lost(self, replica: ReplicaHandle, reason: OmniError) -> None:
        self._post(lambda: self._on_lost(replica, reason))

    # events -----------------------------------------------------------------------------------

    def _post_for(self, state: RequestState, event: Event) -> None:
        self._post(lambda: self._handle(state, event))

    def _handle(self, state: RequestState, event: Event) -> None:
        """Whatever goes wrong while one request is handled ends that request and nothing else."""
        if not state.active:
            return
        try:
            event()
        except OmniError as error:
            self._endings.fail(state, error)
        except Exception as error:
            logger.exception("request %s failed in the engine", state.request_id)
            self._endings.fail(state, as_omni_error(error))

    def _on_message(self, message: Message, frames: Sequence[Any]) -> None:
        if isinstance(message, ControlResult):
            self.calls.answered(message)
            return
        identity = message.identity  # type: ignore[attr-defined]
        state = self.table.get(identity.request_id)
        child = state.children.get(identity.child_index) if state is not None else None
        if state is None or child is None:
            self._on_stray(message)
            return
        with request_scope(state.request_id, message.stage_id):
            if isinstance(message, Aborted):
                self._endings.aborted(state, child.key, message.stage_id)
            else:
                self._handle(state, lambda: self._on_child(state, child, message, frames))

    def _on_child(
        self, state: RequestState, child: Child, message: Message, frames: Sequence[Any]
    ) -> None:
        match message:
            case Output():
                self._on_output(state, child, message, frames)
            case InputConsumed() if message.source_stage_id is None:
                self.entry.consumed(state, child, message)
            case InputConsumed():
                self._router.consumed(child, message)
            case Progress():
                self._events.progress(state, child, message)
            case Failed():
                raise from_record(message.error)

    def _on_stray(self, message: Message) -> None:
        """News of a request that is over. An output still holds memory at its stage."""
        if isinstance(message, Output):
            replica = self.supervisor.pools[message.stage_id].replicas[message.replica_id]
            self.supervisor.send(replica, Abort(identity=message.identity, reason="over"))

    def _on_output(
        self, state: RequestState, child: Child, message: Output, frames: Sequence[Any]
    ) -> None:
        self._router.take(child, message)
        if message.final:
            self._events.record_stage(state, child, message)
        self._router.route(state, child, message, frames)
        if not state.is_complete():
            return
        if not state.stream.finished:
            self._events.terminal(state)
        self._endings.finish(state, state.finish_reason)

    def _on_ready(self, replica: ReplicaHandle) -> None:
        stage_id = replica.stage.stage_id
        for state in self.table.all():
            self._handle(state, partial(self._deliveries.flush, state, stage_id))
        self.table.count()

    def _on_lost(self, replica: ReplicaHandle, reason: OmniError) -> None:
        """Fail the requests that this replica held, and only those."""
        self.calls.fail(reason, replica)
        stage_id = replica.stage.stage_id
        pool = self.supervisor.pools[stage_id]
        for key in pool.bound_keys(replica):
            pool.unbind(key)
            state = self.table.get(key[0])
            if state is None:
                continue
            visit = state.children[key[1]].visits.get(stage_id)
            if not (visit and visit.is_paid):
                self._endings.fail(state, reason)
            self._endings.aborted(state, key, stage_id)
        if not pool.can_recover:
            self._fail_waiting(stage_id, reason)

    def _fail_waiting(self, stage_id: int, reason: OmniError) -> None:
        for state in self.table.all():
            children = state.children.values()
            if any(d.stage_id == stage_id for child in children for d in child.waiting):
                self._endings.fail(state, StageLostError(str(reason)))
