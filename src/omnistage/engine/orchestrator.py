"""The orchestrator: one loop that moves every request from stage to stage.

Everything that can happen is an event in one inbox, and every event is handled without waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    RequestCancelledError,
    SlowClientError,
    StageLostError,
    UnavailableError,
    as_omni_error,
    from_record,
)
from omnistage.contracts.identity import RequestKey
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
from omnistage.contracts.outputs import FinishReason, OmniProgress, OmniRequestOutput
from omnistage.contracts.payloads import StageData
from omnistage.engine.request_state import Child, Phase, RequestState
from omnistage.engine.router import Router
from omnistage.observability.logging import get_logger, request_scope
from omnistage.observability.metrics import EngineMetrics
from omnistage.stages.pool import ReplicaHandle
from omnistage.stages.supervisor import StageSupervisor

logger = get_logger(__name__)

RETRY_AFTER_S = 1.0
Event = Callable[[], None]


class Orchestrator:
    """Owns the state of all requests. Implements the supervisor's `StageListener`."""

    def __init__(self, config: OmniConfig, metrics: EngineMetrics) -> None:
        self._config = config
        self._limits = config.limits
        self._metrics = metrics
        self.supervisor = StageSupervisor(config, self, metrics)
        self._router = Router(config, self.supervisor, metrics, self._deliver_to_client)
        self._requests: dict[str, RequestState] = {}
        self._inbox: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.draining = False
        self._controls: dict[str, asyncio.Future[Any]] = {}

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

    async def close(self) -> None:
        """Fail what is active, stop the loop, free what the engine holds. Idempotent."""
        self.draining = True
        if self._task is None:
            return
        for state in list(self._requests.values()):
            self._fail(state, UnavailableError("the server is shutting down"))
            self._release(state)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        self._router.close()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is left; False when some still are after `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # what the engine asks for -----------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def outstanding_payloads(self) -> int:
        """Payloads that the engine itself holds in shared memory."""
        return self._router.outstanding()

    def admit(self, state: RequestState, *, input_complete: bool) -> None:
        """Take a request in, or refuse it at once.

        Raises `OverloadedError` at the bound, `UnavailableError` while draining.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down", retry_after_s=RETRY_AFTER_S)
        bound = self._limits.max_inflight_requests
        if len(self._requests) >= bound:
            raise OverloadedError(
                f"{len(self._requests)} requests are in flight, the limit is {bound}; "
                "retry later or raise --max-inflight-requests",
                retry_after_s=RETRY_AFTER_S,
            )
        if state.request_id in self._requests:
            raise InvalidRequestError(
                f"request id {state.request_id!r} is already in flight; ids must be unique",
                param="request_id",
            )
        self._requests[state.request_id] = state
        self._idle.clear()
        self._metrics.request_admitted()
        self._count()
        self._set_deadline(state)
        self._post(lambda: self._enter(state, input_complete))

    def append_input(self, state: RequestState, data: StageData, epoch: int) -> None:
        self._post(lambda: self._append(state, data, epoch))

    def end_input(self, state: RequestState, epoch: int) -> None:
        self._post(lambda: self._end_input(state, epoch))

    def abort(self, request_id: str, error: OmniError | None = None) -> RequestState | None:
        """Cancel a request everywhere; its `released` event is set when nothing is left of it."""
        state = self._requests.get(request_id)
        if state is not None:
            reason = error or RequestCancelledError("the request was cancelled")
            self._post(lambda: self._fail(state, reason))
        return state

    def slow_client(self, request_id: str, full: bool) -> None:
        """The request's stream became full, or no longer is."""
        state = self._requests.get(request_id)
        if state is None:
            return
        if state.slow_timer is not None:
            state.slow_timer.cancel()
            state.slow_timer = None
        if full:
            timeout_s = self._limits.slow_client_timeout_s
            error = SlowClientError(
                f"the client has not read its stream for {timeout_s:g} s; the request is cancelled"
            )
            state.slow_timer = self._later(timeout_s, lambda: self._fail(state, error))

    # what the supervisor reports --------------------------------------------------------------

    def stage_message(self, message: Message, frames: Sequence[Any]) -> None:
        self._post(lambda: self._on_message(message, frames))

    def replica_ready(self, replica: ReplicaHandle) -> None:
        self._post(lambda: self._on_ready(replica))

    def replica_lost(self, replica: ReplicaHandle, reason: OmniError) -> None:
        self._post(lambda: self._on_lost(replica, reason))

    # events: requests -------------------------------------------------------------------------

    def _enter(self, state: RequestState, input_complete: bool) -> None:
        if not state.active:
            return
        with self._guard(state):
            for child in state.children.values():
                self._router.enter(state, child, child.inputs, last=input_complete)

    def _append(self, state: RequestState, data: StageData, epoch: int) -> None:
        if not state.active:
            return
        with self._guard(state):
            for child in state.children.values():
                self._router.enter(state, child, data, last=False, epoch=epoch)

    def _end_input(self, state: RequestState, epoch: int) -> None:
        if not state.active:
            return
        with self._guard(state):
            for child in state.children.values():
                self._router.end_input(state, child, epoch)

    # events: stages ---------------------------------------------------------------------------

    def _on_message(self, message: Message, frames: Sequence[Any]) -> None:
        if isinstance(message, ControlResult):
            self._on_control_result(message)
            return
        identity = message.identity  # type: ignore[attr-defined]
        state = self._requests.get(identity.request_id)
        child = state.children.get(identity.child_index) if state is not None else None
        if state is None or child is None:
            self._on_stray(message)
            return
        with request_scope(state.request_id, message.stage_id):
            match message:
                case Aborted():
                    self._on_aborted(state, child.key, message.stage_id)
                case _ if not state.active:
                    pass
                case Output():
                    self._on_output(state, child, message, frames)
                case InputConsumed():
                    self._on_consumed(state, child, message)
                case Progress():
                    self._on_progress(state, child, message)
                case Failed():
                    self._fail(state, from_record(message.error))

    def _on_stray(self, message: Message) -> None:
        """News of a request that is over. An output still holds memory at its stage."""
        if isinstance(message, Output):
            replica = self.supervisor.pools[message.stage_id].replicas[message.replica_id]
            self.supervisor.send(replica, Abort(identity=message.identity, reason="over"))

    def _on_output(
        self, state: RequestState, child: Child, message: Output, frames: Sequence[Any]
    ) -> None:
        with self._guard(state):
            if message.final:
                self._record_stage(state, child, message)
            self._router.route(state, child, message, frames)
            if state.is_complete() and not state.stream.finished:
                state.stream.put(self._terminal(state))
            if state.stream.finished:
                self._finish(state)

    def _on_consumed(self, state: RequestState, child: Child, message: InputConsumed) -> None:
        self._router.consumed(state, child, message)
        if message.source_stage_id is None and state.input_credits is not None:
            state.input_credits.release()

    def _on_progress(self, state: RequestState, child: Child, message: Progress) -> None:
        state.stream.put(
            OmniRequestOutput(
                request_id=state.request_id,
                stage_id=message.stage_id,
                replica_id=message.replica_id,
                child_index=child.identity.child_index,
                partial=True,
                progress=OmniProgress(
                    stage_id=message.stage_id,
                    step=message.step,
                    total_steps=message.total_steps,
                ),
            )
        )

    def _on_ready(self, replica: ReplicaHandle) -> None:
        for state in list(self._requests.values()):
            with self._guard(state):
                self._router.flush(state, replica.stage.stage_id)

    def _on_lost(self, replica: ReplicaHandle, reason: OmniError) -> None:
        """Fail the requests that this replica held, and only those."""
        pool = self.supervisor.pools[replica.stage.stage_id]
        stage_id = replica.stage.stage_id
        for key in pool.bound_keys(replica):
            pool.unbind(key)
            state = self._requests.get(key[0])
            if state is None:
                continue
            visit = state.children[key[1]].visits.get(stage_id)
            if state.active and not (visit and visit.is_paid):
                self._fail(state, reason)
            self._on_aborted(state, key, stage_id)
        if not pool.can_recover:
            self._fail_waiting(stage_id, reason)

    def _fail_waiting(self, stage_id: int, reason: OmniError) -> None:
        for state in list(self._requests.values()):
            children = state.children.values()
            if any(d.stage_id == stage_id for child in children for d in child.waiting):
                self._fail(state, StageLostError(str(reason)))

    # towards the caller -----------------------------------------------------------------------

    def _deliver_to_client(
        self, state: RequestState, child: Child, message: Output, frames: Sequence[Any]
    ) -> None:
        """The bytes are mapped now, so that they outlive their producer; the credit goes back
        when the caller takes the event."""
        data = self._router.receive(message.payload, frames, message.stage_id)
        finished = state.is_complete()

        def taken() -> None:
            self._post(lambda: self._on_taken(state, child, message))

        state.stream.put(
            OmniRequestOutput(
                request_id=state.request_id,
                prompt=state.request.prompt,
                stage_id=message.stage_id,
                replica_id=message.replica_id,
                child_index=child.identity.child_index,
                output_index=message.output_index,
                modality=data.modality,
                partial=not message.final,
                finished=finished,
                finish_reason=_finish_reason(message) if message.final else None,
                tensors=data.tensors,
                fields=data.fields,
                stage_durations=dict(state.stage_durations) if finished else {},
                peak_memory_mb=data.fields.pop("peak_memory_mb", None),
            ),
            None if message.final else taken,
        )
        if message.final:
            self._router.pay(child, message.stage_id, message.sequence)

    def _on_taken(self, state: RequestState, child: Child, message: Output) -> None:
        if state.active:
            self._router.pay(child, message.stage_id, message.sequence)

    def _terminal(self, state: RequestState) -> OmniRequestOutput:
        return OmniRequestOutput(
            request_id=state.request_id,
            prompt=state.request.prompt,
            finished=True,
            finish_reason=FinishReason.STOP,
            stage_durations=dict(state.stage_durations),
        )

    def _record_stage(self, state: RequestState, child: Child, message: Output) -> None:
        stage = self._config.stages[message.stage_id]
        seconds = time.monotonic() - child.visits[message.stage_id].started_at
        longest = max(seconds, state.stage_durations.get(stage.name, 0.0))
        state.stage_durations[stage.name] = longest
        steps = message.payload.fields.get("num_inference_steps")
        self._metrics.stage_finished(stage.name, message.replica_id, message.timings_s, steps)

    # the end of a request ---------------------------------------------------------------------

    def _finish(self, state: RequestState) -> None:
        elapsed_s = time.monotonic() - state.created_at
        self._metrics.request_finished(FinishReason.STOP, elapsed_s)
        self._leave_active(state)
        for child in state.children.values():
            self._router.pay_all(child)
        self._release(state)

    def _fail(self, state: RequestState, error: OmniError) -> None:
        """End a request: tell its caller, stop it at every stage, free it there."""
        if not state.active:
            return
        self._leave_active(state)
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
            timeout_s = self._limits.abort_timeout_s
            state.timers.append(self._later(timeout_s, lambda: self._give_up_abort(state)))
        else:
            self._release(state)

    def _leave_active(self, state: RequestState) -> None:
        state.phase = Phase.ENDED
        state.cancel_timers()
        state.joins.clear()

    def _abort_child(self, state: RequestState, child: Child, reason: str) -> None:
        for stage_id, visit in child.visits.items():
            replica = self.supervisor.pools[stage_id].binding(child.key)
            if replica is not None and visit.submitted and not visit.is_paid:
                state.pending_aborts.add((child.key, stage_id))
                self.supervisor.send(replica, Abort(identity=child.identity, reason=reason))

    def _on_aborted(self, state: RequestState, key: RequestKey, stage_id: int) -> None:
        state.pending_aborts.discard((key, stage_id))
        if not state.active and not state.pending_aborts:
            self._release(state)

    def _give_up_abort(self, state: RequestState) -> None:
        logger.error(
            "stages %s did not confirm the abort of %s within %g s",
            sorted({stage_id for _, stage_id in state.pending_aborts}),
            state.request_id,
            self._limits.abort_timeout_s,
        )
        self._release(state)

    def _release(self, state: RequestState) -> None:
        """Forget a request that nobody holds any more."""
        if self._requests.pop(state.request_id, None) is None:
            return
        state.cancel_timers()
        for child in state.children.values():
            self._router.forget(child)
            for pool in self.supervisor.pools:
                pool.unbind(child.key)
        state.released.set()
        self._count()
        if not self._requests:
            self._idle.set()

    # small things -----------------------------------------------------------------------------

    def _guard(self, state: RequestState) -> _Guard:
        return _Guard(self, state)

    def _set_deadline(self, state: RequestState) -> None:
        remaining_s = state.request.identity.remaining_s()
        if remaining_s is None:
            return
        error = DeadlineExceededError(
            "the request did not finish before its deadline; raise --request-timeout-s or ask "
            "for less"
        )
        state.timers.append(self._later(remaining_s, lambda: self._fail(state, error)))

    def _later(self, delay_s: float, event: Event) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self._post, event)

    def _count(self) -> None:
        waiting = sum(any(c.waiting for c in s.children.values()) for s in self._requests.values())
        self._metrics.request_running(len(self._requests) - waiting)
        self._metrics.request_waiting(waiting)

    async def control(
        self, replica: ReplicaHandle, call_id: str, message: Message, timeout_s: float
    ) -> Any:
        """Call a replica's executor and wait for its answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._controls[call_id] = future
        try:
            self.supervisor.send(replica, message)
            return await asyncio.wait_for(future, timeout_s)
        finally:
            del self._controls[call_id]

    def _on_control_result(self, message: ControlResult) -> None:
        future = self._controls.get(message.call_id)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(from_record(message.error))
        else:
            future.set_result(message.result)


class _Guard:
    """Whatever goes wrong while one request is handled ends that request and nothing else."""

    def __init__(self, orchestrator: Orchestrator, state: RequestState) -> None:
        self._orchestrator = orchestrator
        self._state = state

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        if not isinstance(error, OmniError):
            logger.exception("request %s failed in the engine", self._state.request_id)
        self._orchestrator._fail(self._state, as_omni_error(error))
        return True


def _finish_reason(message: Output) -> FinishReason:
    return FinishReason(message.finish_reason or FinishReason.STOP)


def _log_failure(state: RequestState, error: OmniError) -> None:
    level = logger.error if error.status >= 500 else logger.info
    level("request %s failed: %s: %s", state.request_id, error.type, error)
    if isinstance(error, InternalError) and error.detail:
        logger.error("%s", error.detail)
