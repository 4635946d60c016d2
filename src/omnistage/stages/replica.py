"""A replica's leader: one executing thread that schedules, executes with its ranks, and emits."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import (
    OmniError,
    StageLostError,
    UnavailableError,
    as_omni_error,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import (
    Abort,
    Aborted,
    Acknowledge,
    AppendInput,
    Control,
    ControlResult,
    Drain,
    EndInput,
    Failed,
    LoadProgress,
    Message,
    Progress,
    RankProgress,
    Ready,
    ReplicaFailed,
    ReplicaStatus,
    Shutdown,
    StartFailed,
    Stopped,
    Submit,
)
from omnistage.contracts.runtime import Command, Emission, JoinsRanks
from omnistage.observability.logging import DEFAULT_LOGS, LogSettings, get_logger, request_scope
from omnistage.stages.commands import CommandRunner, LeaderContext, log_scope
from omnistage.stages.controls import ReplicaControls
from omnistage.stages.emitter import Emitter, MessageSink
from omnistage.stages.imports import load_object
from omnistage.stages.intake import Intake
from omnistage.stages.late_lanes import LateLanes
from omnistage.stages.loading_turn import load_in_turn
from omnistage.stages.operations import OperationClock
from omnistage.stages.output_worker import LateOutput
from omnistage.stages.ranks import RankGroup
from omnistage.transport.registry import make_connector

logger = get_logger(__name__)

DRAIN_LIMIT_S = 10.0
_IDLE_WAIT_S = 60.0
_STATS_EVERY_S = 0.5
Mail = tuple[Message | LateOutput, Sequence[Any]]


class Replica:
    """One replica of one stage. `deliver` may be called from any thread; all else happens in the
    executing thread that `start` creates."""

    def __init__(
        self,
        stage: ResolvedStage,
        replica_id: int,
        send: MessageSink,
        on_rank_exit: Callable[[Replica, int, int], None],
        *,
        connector_kind: str,
        log: LogSettings = DEFAULT_LOGS,
    ) -> None:
        self.stage = stage
        self.replica_id = replica_id
        self._send = send
        self._on_rank_exit = on_rank_exit
        self._log = log
        self._inbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._cancelled: set[RequestKey] = set()
        self._clock = OperationClock({**stage.operation_limits_s, "load": stage.init_timeout_s})
        self._connector = make_connector(
            connector_kind, shm_threshold_bytes=stage.shm_threshold_bytes
        )
        self._outputs = LateLanes(
            stage.name,
            stage.stage_id,
            replica_id,
            limit_s=self._clock.limit_s,
            max_num_seqs=stage.max_num_seqs,
            on_outcome=lambda late: self._inbox.put((late, ())),
            on_stall=self._output_stalled,
        )
        self._counts = (0, 0)
        self._stats: dict[str, float] = {}
        self._stats_at_s = 0.0
        self._draining = False
        self._stopping = False
        self._executor: Any = None
        self._ranks: Any = None
        self._controls: Any = None
        self._thread = threading.Thread(
            target=self._run, name=f"stage-{stage.stage_id}-{replica_id}", daemon=True
        )

    # from any thread --------------------------------------------------------------------------

    def start(self) -> None:
        self._clock.begin("load")
        self._thread.start()

    def deliver(self, message: Message, frames: Sequence[Any] = ()) -> None:
        if isinstance(message, Abort):
            self._cancelled.add(message.identity.key)
        elif isinstance(message, Shutdown):
            self._stopping = True
            self._outputs.end_waits()
        self._inbox.put((message, frames))

    def is_cancelled(self, key: RequestKey) -> bool:
        return self._stopping or key in self._cancelled

    def status(self) -> ReplicaStatus:
        running, waiting = self._counts
        return ReplicaStatus(
            stage_id=self.stage.stage_id,
            replica_id=self.replica_id,
            running=running,
            waiting=waiting,
            operation=self._clock.snapshot(),
            stats=self._stats,
        )

    def post(self, message: Message, frames: Sequence[Any] = ()) -> None:
        """Send a message with this replica's address on it."""
        address = {"stage_id": self.stage.stage_id, "replica_id": self.replica_id}
        self._send(msgspec.structs.replace(message, **address), frames)

    def _output_stalled(self, error: StageLostError) -> None:
        """Called by the output thread's watcher; the executing thread may be busy for long."""
        self.post(ReplicaFailed(error=error.to_record()))
        self.deliver(Shutdown())

    # executing thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Ends with exactly one `StartFailed` or `Stopped`, whatever happens."""
        try:
            self._load()
        except BaseException as error:
            failure = as_omni_error(error, detail=traceback.format_exc())
            self._close_all()
            self.post(StartFailed(error=failure.to_record()))
            return
        try:
            self._serve()
        except BaseException as error:
            failure = as_omni_error(error, detail=traceback.format_exc())
            logger.error("stage %s is unusable: %s", self.stage.name, failure.detail)
            self.post(ReplicaFailed(error=failure.to_record()))
        self._close_all()
        self._clock.idle()
        self.post(Stopped())

    def _load(self) -> None:
        started = time.monotonic()
        runtime = load_object(self.stage.stage.runtime)
        world_size = self.stage.parallel.world_size
        self._scheduler = runtime.scheduler(self.stage)  # Refuses before any process is started.
        self._ranks = RankGroup(
            self.stage,
            self.replica_id,
            self._log,
            lambda rank, code: self._on_rank_exit(self, rank, code),
            self._post_progress,
        )
        self._executor = runtime.executor(self.stage, 0, world_size)
        if isinstance(self._executor, JoinsRanks) and (meet := self._ranks.open_rendezvous()):
            self._executor.join(meet)
        self._ranks.begin_load()
        description = load_in_turn(self._executor, self._report_load)
        self._ranks.finish_load()
        context = LeaderContext(
            world_size, self._ranks, self._clock, self.is_cancelled, self.post, self._outputs
        )
        self._runner = CommandRunner(self._executor, self._ranks, self._clock, context)
        self._emitter = Emitter(
            self.stage.stage_id,
            self.replica_id,
            self._connector,
            self._send,
            self._scheduler.set_credits,
        )
        self._intake = Intake(
            self.stage, self._connector, self._emitter, self._scheduler, self._executor, self.post
        )
        self._controls = ReplicaControls(
            self.stage.name,
            self.replica_id,
            self._executor,
            self._scheduler,
            self._held_resources,
            self._finish_outputs,
        )
        self._clock.idle()
        load_s = time.monotonic() - started
        self.post(Ready(description=description, load_s=load_s, rank_pids=self._ranks.pids))

    def _report_load(self, note: str, fraction: float | None) -> None:
        """The points at which a load can end early: a shutdown, a rank that has failed."""
        if self._stopping:
            raise UnavailableError("this replica was stopped while it was loading")
        self._ranks.raise_early_error()
        self.post(LoadProgress(note=note, fraction=fraction))

    def _post_progress(self, one: RankProgress) -> None:
        """Of a rank that is still at work when the leader's own part may be done."""
        self._clock.touch()
        self.post(Progress(identity=one.identity, step=one.step, total_steps=one.total_steps))

    def _serve(self) -> None:
        """The replica's one loop: mail, one command, emissions."""
        while not self._stopping:
            self._read_mail(wait=False)
            if self._stopping:
                return  # Its mail has been read: nothing would end a wait.
            command = self._scheduler.next_command()
            self._counts = self._scheduler.counts()
            self._count_stats(idle=command is None)
            if command is not None:
                self._step(command)
            elif self._draining and not self._holds_anything():
                return
            else:
                self._clock.idle()
                self._read_mail(wait=True, limit_s=self._scheduler.next_wake_s())

    def _count_stats(self, *, idle: bool) -> None:
        """Steps are many: counted now and then, and before a wait."""
        stats = getattr(self._scheduler, "stats", None)
        if stats is not None and (idle or time.monotonic() - self._stats_at_s > _STATS_EVERY_S):
            self._stats, self._stats_at_s = stats(), time.monotonic()

    def _holds_anything(self) -> bool:
        """Work to do, or outputs that nobody has taken yet."""
        return (
            self._counts != (0, 0)
            or self._emitter.num_children > 0
            or self._outputs.num_pending > 0
        )

    def _step(self, command: Command) -> None:
        with request_scope(log_scope(command), self.stage.stage_id):
            with self._controls.profiled(command):
                outcome = self._runner.run(command)
            self._controls.command_done()
            if isinstance(outcome, OmniError):
                emissions = list(self._scheduler.fail(command, outcome))
            else:
                emissions = list(self._scheduler.complete(command, outcome))
            self._emit_all(emissions)

    def _emit_all(self, emissions: Sequence[Emission]) -> None:
        """A child whose output cannot travel fails; what else it has to say is dropped."""
        failed: set[RequestKey] = set()
        for emission in emissions:
            key = emission.identity.key
            if key in failed or self.is_cancelled(key):
                continue  # Cancelled: its Abort is in the mail, or this replica ends.
            try:
                ended = self._emitter.emit(emission)
            except OmniError as error:
                failed.add(key)
                self._scheduler.abort(key)
                ended = self._emitter.emit(Emission(identity=emission.identity, error=error))
            if ended:
                self._release(key)

    # mail -------------------------------------------------------------------------------------

    def _read_mail(self, *, wait: bool, limit_s: float | None = None) -> None:
        """Handle all mail that is there; with `wait`, sleep until some arrives or the scheduler
        has something to do without (`limit_s`)."""
        timeout_s = _IDLE_WAIT_S if limit_s is None else min(limit_s, _IDLE_WAIT_S)
        try:
            self._handle(*self._inbox.get(block=wait, timeout=timeout_s))
            while True:
                self._handle(*self._inbox.get_nowait())
        except queue.Empty:
            pass

    def _handle(self, message: Message | LateOutput, frames: Sequence[Any]) -> None:
        match message:
            case LateOutput():
                self._deliver_late(message)
            case Submit() | AppendInput() | EndInput():
                if message.identity.key not in self._cancelled:
                    self._take_in(message, frames)
            case Acknowledge():
                self._emitter.acknowledge(message.identity.key, message.sequence)
            case Abort():
                self._abort(message.identity)
            case Control():
                self._control(message)
            case Drain():
                self._draining = True

    def _take_in(self, message: Submit | AppendInput | EndInput, frames: Sequence[Any]) -> None:
        self._clock.begin("encode")  # Input adapters may run parts of the model.
        if isinstance(message, AppendInput):
            self._intake.append(message, frames)
        elif isinstance(message, EndInput):
            self._intake.end(message)
        elif self._draining or self._stopping:
            error = UnavailableError("this replica is stopping; please retry", retry_after_s=1.0)
            self.post(Failed(identity=message.identity, error=error.to_record()))
        else:
            self._intake.submit(message, frames)

    def _deliver_late(self, late: LateOutput) -> None:
        outcome = self._outputs.take(late)
        key = late.identity.key
        if outcome is None or self.is_cancelled(key) or not self._emitter.is_open(key):
            return
        if isinstance(outcome, StageLostError):
            raise outcome  # The work says so of the device, as an executor may.
        with request_scope(str(late.identity), self.stage.stage_id):
            self._clock.begin("output")
            self._emit_all(list(self._scheduler.deliver(late.identity, outcome)))

    def _abort(self, identity: RequestIdentity) -> None:
        """Free everything this child holds here, then say so."""
        self._scheduler.abort(identity.key)
        self._release(identity.key)
        self._emitter.forget(identity.key)
        self._cancelled.discard(identity.key)
        self.post(Aborted(identity=identity))

    def _control(self, message: Control) -> None:
        self._clock.begin("control")
        try:
            result = self._controls.call(message.method, message.arguments)
            self.post(ControlResult(call_id=message.call_id, result=result))
        except Exception as error:
            record = as_omni_error(error, detail=traceback.format_exc()).to_record()
            self.post(ControlResult(call_id=message.call_id, error=record))

    def _held_resources(self) -> dict[str, int]:
        """What is held for requests: all zero when none is here."""
        return {
            "children": self._emitter.num_children,
            "inputs": self._intake.num_children,
            "payloads": self._connector.outstanding(),
            "payload_bytes": self._connector.outstanding_bytes(),
            "cancelled": len(self._cancelled),
            "scheduled": sum(self._scheduler.counts()),
            "late_outputs": self._outputs.num_pending,
        }

    def _finish_outputs(self) -> None:
        """Before a call that may free what late outputs still read."""
        if not self._outputs.drain_outputs(DRAIN_LIMIT_S):
            raise UnavailableError(
                f"outputs are still being finished after {DRAIN_LIMIT_S:g} s; retry the call",
                retry_after_s=1.0,
            )

    # the end ----------------------------------------------------------------------------------

    def _release(self, key: RequestKey) -> None:
        self._outputs.withdraw(key)
        self._intake.forget(key)
        self._executor.release(key)
        self._ranks.release(key)

    def _close_all(self) -> None:
        """Close whatever exists. One that fails keeps no other from being closed."""
        closers = [
            self._controls and self._controls.close,
            lambda: self._outputs.close(DRAIN_LIMIT_S),
            self._executor and self._executor.close,
            self._connector.close,
            self._ranks and self._ranks.stop,
        ]
        for close in filter(None, closers):
            try:
                close()
            except Exception:
                logger.exception("stage %s did not close cleanly", self.stage.name)
