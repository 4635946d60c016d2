"""The lifecycle of all replicas: start, readiness, liveness, restart with backoff, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from omnistage.config.resolved import INLINE_PROCESS, OmniConfig
from omnistage.contracts.errors import (
    InternalError,
    OmniError,
    StageLostError,
    UnavailableError,
    from_record,
)
from omnistage.contracts.messages import (
    Drain,
    Heartbeat,
    Hello,
    LoadProgress,
    Message,
    Ready,
    ReplicaFailed,
    StartFailed,
    Stopped,
)
from omnistage.observability.logging import LogSettings, get_logger
from omnistage.observability.metrics import EngineMetrics
from omnistage.stages.pool import ReplicaHandle, ReplicaState, StagePool
from omnistage.stages.start_gate import StartGate
from omnistage.stages.switchboard import Switchboard
from omnistage.stages.units import InlineUnit, ProcessUnit, Unit

logger = get_logger(__name__)

_SHORTEST_TICK_S, _LONGEST_TICK_S = 0.05, 1.0
Address = tuple[int, int]


class StageListener(Protocol):
    """The orchestrator, as the supervisor sees it. Called on the event loop; must not block."""

    def stage_message(self, message: Message, frames: Sequence[Any]) -> None: ...

    def replica_ready(self, replica: ReplicaHandle) -> None: ...

    def replica_lost(self, replica: ReplicaHandle, reason: OmniError) -> None: ...


class StageSupervisor:
    """Owns every replica. Nobody else starts, kills or retires one."""

    def __init__(self, config: OmniConfig, listener: StageListener, metrics: EngineMetrics) -> None:
        self.pools = tuple(StagePool(stage, config.lb_policy) for stage in config.stages)
        self._config = config
        self._listener = listener
        self._metrics = metrics
        self._units: list[Unit] = []
        self._unit_of: dict[Address, Unit] = {}
        self._switchboard: Switchboard | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._restarts: dict[int, asyncio.TimerHandle] = {}
        """By the unit's index."""
        self._draining = False
        self._stopping = False
        self._start = StartGate(self._is_ready)

    # starting and stopping --------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything and wait until all replicas are ready.

        Raises what the first failing replica reported; the caller then calls `stop`.
        """
        self._units = self._make_units()
        for unit in self._units:
            unit.start()
        self._watchdog = asyncio.create_task(self._watch(), name="watchdog")
        await self._start.wait(2 * max(stage.init_timeout_s for stage in self._config.stages))

    async def stop(self) -> None:
        """End every replica, by force if need be. Call it once; a start that waits fails."""
        self._stopping = True
        self._start.fail(UnavailableError("the engine was shut down before it was ready"))
        for timer in self._restarts.values():
            timer.cancel()
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        timeout_s = self._config.limits.shutdown_timeout_s
        results = await asyncio.gather(
            *(unit.stop(timeout_s) for unit in self._units), return_exceptions=True
        )
        for unit, result in zip(self._units, results, strict=True):
            if isinstance(result, BaseException):
                logger.error("a replica process did not end: %s", result)
            for replica in unit.replicas:
                self._set_state(replica, ReplicaState.STOPPED, "stopped")
        if self._switchboard is not None:
            await self._switchboard.close()

    def drain(self) -> None:
        """Let every replica finish what it holds and end. None comes back after that."""
        self._draining = True
        for pool in self.pools:
            for replica in pool.replicas:
                if replica.state is ReplicaState.READY:
                    self.send(replica, Drain())

    def send(self, replica: ReplicaHandle, message: Message, frames: Sequence[Any] = ()) -> None:
        """Address and queue a message. A process that is just dying loses it silently: its
        `replica_lost` is on the way and ends everything that waits for an answer."""
        addressed = msgspec.structs.replace(
            message, stage_id=replica.stage.stage_id, replica_id=replica.replica_id
        )
        try:
            self._unit_of[replica.address].send(addressed, frames)
        except StageLostError as error:
            logger.debug("message to stage %s lost: %s", replica.stage.name, error)

    def _make_units(self) -> list[Unit]:
        """Replicas whose stages name the same process share it, index by index."""
        groups: dict[tuple[str, int], list[ReplicaHandle]] = {}
        for pool in self.pools:
            for replica in pool.replicas:
                groups.setdefault((pool.stage.process, replica.replica_id), []).append(replica)
        if any(process != INLINE_PROCESS for process, _ in groups):
            self._switchboard = Switchboard()
        units = [self._make_unit(process, group) for (process, _), group in groups.items()]
        for unit in units:
            for replica in unit.replicas:
                self._unit_of[replica.address] = unit
        return units

    def _make_unit(self, process: str, group: list[ReplicaHandle]) -> Unit:
        log = LogSettings(level=self._config.log_level, json=self._config.log_json)
        if process == INLINE_PROCESS:
            return InlineUnit(group, self, log)
        assert self._switchboard is not None
        return ProcessUnit(group, self._switchboard, self, log)

    def _is_ready(self) -> bool:
        return all(r.state is ReplicaState.READY for pool in self.pools for r in pool.replicas)

    # what units report ------------------------------------------------------------------------

    def unit_message(self, unit: Unit, message: Message, frames: Sequence[Any]) -> None:
        match message:
            case Hello() | Stopped():
                pass
            case Heartbeat():
                for status in message.statuses:
                    replica = self._replica(status.stage_id, status.replica_id)
                    replica.heard(status)
                    self._metrics.stage_status(
                        replica.stage.name, replica.replica_id, status.running, status.waiting
                    )
                    self._metrics.token_stats(replica.stage.name, replica.replica_id, status.stats)
            case LoadProgress():
                self._loads(self._replica(message.stage_id, message.replica_id), message.note)
            case Ready():
                self._became_ready(message)
            case StartFailed() | ReplicaFailed():
                self._failed(unit, message)
            case _:
                self._listener.stage_message(message, frames)

    def unit_ended(self, unit: Unit, reason: OmniError) -> None:
        """A unit died. Its requests fail now; it comes back after a backoff, if it may."""
        if self._stopping:
            return
        if self._draining:
            self._lose(unit, ReplicaState.STOPPED, reason)
            return
        logger.error("%s", reason)
        backoff_s = unit.restarts.next_backoff_s() if unit.can_restart else None
        if backoff_s is None or not self._start.open:
            self._lose(unit, ReplicaState.DOWN, reason)
            self._start.fail(reason)
            return
        self._lose(unit, ReplicaState.RESTARTING, reason)
        timer = asyncio.get_running_loop().call_later(backoff_s, self._restart, unit)
        self._restarts[self._units.index(unit)] = timer

    def _restart(self, unit: Unit) -> None:
        del self._restarts[self._units.index(unit)]
        for replica in unit.replicas:
            self._metrics.replica_restarted(replica.stage.name, replica.replica_id)
            self._set_state(replica, ReplicaState.STARTING, "restarting")
        try:
            unit.start()
        except OSError as error:  # No memory or descriptors for a process, just now.
            self.unit_ended(unit, StageLostError(f"a stage's process cannot start: {error}"))

    def _give_up(self, unit: Unit, reason: OmniError) -> None:
        """Lose its requests now: the system may take long to end a process that is stuck."""
        if unit.can_restart:
            self._lose(unit, ReplicaState.RESTARTING, reason)
        unit.kill(reason)

    def _lose(self, unit: Unit, state: ReplicaState, reason: OmniError) -> None:
        for replica in unit.replicas:
            replica.heard(None)
            self._set_state(replica, state, str(reason))
            self._listener.replica_lost(replica, reason)

    def _became_ready(self, message: Ready) -> None:
        replica = self._replica(message.stage_id, message.replica_id)
        replica.description = message.description
        replica.pids = (*replica.pids, *message.rank_pids)
        replica.heard(None)
        self._set_state(replica, ReplicaState.READY, "")
        self._metrics.stage_loaded(replica.stage.name, replica.replica_id, message.load_s)
        self._listener.replica_ready(replica)

    def _failed(self, unit: Unit, message: StartFailed | ReplicaFailed) -> None:
        error = from_record(message.error)
        if isinstance(error, InternalError) and error.detail:
            logger.error("stage %d failed: %s", message.stage_id, error.detail)
        if not self._start.open:
            self._start.fail(error)
        if not isinstance(error, StageLostError):
            name = self.pools[message.stage_id].stage.name
            what = (
                "broke; please retry"
                if isinstance(error, InternalError)
                else f"stays down: {error}"
            )
            error = StageLostError(f"stage {name!r} {what}", detail=error.detail)
        self._give_up(unit, error)

    def _loads(self, replica: ReplicaHandle, note: str) -> None:
        if note != replica.note:
            logger.info("stage %s replica %d: %s", replica.stage.name, replica.replica_id, note)
        replica.note = note

    def _set_state(self, replica: ReplicaHandle, state: ReplicaState, note: str) -> None:
        replica.state, replica.note = state, note
        self._metrics.replica_up(
            replica.stage.name, replica.replica_id, state is ReplicaState.READY
        )
        self._start.changed()

    def _replica(self, stage_id: int, replica_id: int) -> ReplicaHandle:
        return self.pools[stage_id].replicas[replica_id]

    # liveness ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Liveness has no event of its own: silence is what is looked for."""
        tightest_s = min(stage.heartbeat_timeout_s for stage in self._config.stages)
        tick_s = min(max(tightest_s / 4, _SHORTEST_TICK_S), _LONGEST_TICK_S)
        while True:
            await asyncio.sleep(tick_s)
            for unit in self._units:
                try:
                    self._check(unit)
                except Exception:
                    logger.exception("the watchdog failed on one of the stages")

    def _check(self, unit: Unit) -> None:
        unit.poll()
        for replica in unit.replicas:
            if replica.state not in (ReplicaState.STARTING, ReplicaState.READY):
                continue
            overdue = replica.overdue()
            if overdue is not None:
                name = replica.stage.name
                self._give_up(unit, StageLostError(f"stage {name!r} hung: {overdue}; please retry"))
                return
