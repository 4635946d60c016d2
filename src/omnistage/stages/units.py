"""Failure units: what starts, dies and restarts together.

A process unit is one replica process (with its ranks) and all replicas in it; an inline unit
lives in the engine's own process and cannot be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from omnistage.config.resolved import RestartPolicy
from omnistage.contracts.errors import OmniError, ProtocolError, StageLostError
from omnistage.contracts.messages import Heartbeat, Message, Shutdown, StartFailed, Stopped
from omnistage.observability.logging import LogSettings, get_logger
from omnistage.stages.host import ReplicaHost
from omnistage.stages.launch import (
    ProcessLaunch,
    ReplicaLaunch,
    describe_exit,
    start_child,
)
from omnistage.stages.pool import ReplicaHandle, ReplicaState
from omnistage.stages.switchboard import Line, Switchboard
from omnistage.transport.sockets import new_token

logger = get_logger(__name__)

REPLICA_MODULE = "omnistage.stages.replica_process"
_MOST_DOUBLINGS = 60


class UnitOwner(Protocol):
    """The supervisor, as its units see it. Called on the event loop only."""

    def unit_message(self, unit: Unit, message: Message, frames: Sequence[Any]) -> None: ...

    def unit_ended(self, unit: Unit, reason: OmniError) -> None: ...


class Unit(Protocol):
    replicas: list[ReplicaHandle]
    restarts: RestartHistory
    can_restart: bool

    def start(self) -> None: ...

    def send(self, message: Message, frames: Sequence[Any] = ()) -> None: ...

    def poll(self) -> None:
        """Refresh the replicas' statuses where nobody sends them."""

    def kill(self, reason: OmniError) -> None:
        """End it now and listen to it no more; `unit_ended` follows."""

    async def stop(self, timeout_s: float) -> None:
        """End it in order, then by force. Idempotent; no `unit_ended` follows."""


class RestartHistory:
    """When this unit died, and how long to wait before the next start."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: deque[float] = deque()

    def next_backoff_s(self) -> float | None:
        """Record a death; the wait before the restart, or None when it died too often."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - self._policy.window_s:
            self._deaths.popleft()
        if len(self._deaths) > self._policy.max_restarts:
            return None
        backoff_s = self._policy.backoff_s * 2.0 ** min(len(self._deaths) - 1, _MOST_DOUBLINGS)
        return min(backoff_s, self._policy.max_backoff_s)


class ProcessUnit:
    can_restart = True

    def __init__(
        self,
        replicas: list[ReplicaHandle],
        switchboard: Switchboard,
        owner: UnitOwner,
        log: LogSettings,
    ) -> None:
        self.replicas = replicas
        self.restarts = RestartHistory(replicas[0].stage.restart)
        self._switchboard = switchboard
        self._owner = owner
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._reason: OmniError | None = None
        self._stopping = False
        self._ended = asyncio.Event()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._reason = None
        self._ended.clear()
        self._line = Line(new_token(), self._on_message, self._on_malformed)
        self._switchboard.expect(self._line)
        launch = ProcessLaunch(
            endpoint=self._switchboard.address,
            token=self._line.token,
            replicas=tuple(
                ReplicaLaunch(stage=replica.stage, replica_id=replica.replica_id)
                for replica in self.replicas
            ),
            sys_path=tuple(sys.path),
            log=self._log,
            heartbeat_interval_s=min(
                1.0, min(replica.stage.heartbeat_timeout_s for replica in self.replicas) / 5
            ),
        )
        for replica in self.replicas:
            replica.status_at = time.monotonic()

        def exited(code: int) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits for this.
                loop.call_soon_threadsafe(self._on_exit, code)

        self._process = start_child(REPLICA_MODULE, launch, exited)
        for replica in self.replicas:
            replica.pids = (self._process.pid,)

    def send(self, message: Message, frames: Sequence[Any] = ()) -> None:
        assert self._line is not None
        self._switchboard.send(self._line, message, frames)

    def poll(self) -> None:
        pass

    def kill(self, reason: OmniError) -> None:
        self._reason = self._reason or reason
        if self._line is not None:
            self._switchboard.forget(self._line)
        if self._process is not None:
            self._process.kill()

    async def stop(self, timeout_s: float) -> None:
        """A process that is still loading is killed at once: it holds nothing to be kept."""
        self._stopping = True
        if self._process is None or self._ended.is_set():
            return
        if all(replica.state is ReplicaState.READY for replica in self.replicas):
            with contextlib.suppress(StageLostError):  # It has ended by itself after its drain.
                self.send(Shutdown())
            try:
                await asyncio.wait_for(self._ended.wait(), timeout_s)
            except TimeoutError:
                logger.warning("a replica process is killed: it did not stop in %g s", timeout_s)
        self._process.kill()
        await asyncio.wait_for(self._ended.wait(), timeout_s)

    def _on_message(self, message: Message, frames: Sequence[memoryview]) -> None:
        self._owner.unit_message(self, message, frames)

    def _on_malformed(self, error: ProtocolError) -> None:
        logger.error("a stage broke the protocol: %s", error)
        self.kill(StageLostError("a stage broke the protocol; please retry"))

    def _on_exit(self, code: int) -> None:
        assert self._line is not None
        self._switchboard.forget(self._line)
        self._ended.set()
        if not self._stopping:
            names = ", ".join(repr(replica.stage.name) for replica in self.replicas)
            default = f"the process of stage {names} ended ({describe_exit(code)}); please retry"
            self._owner.unit_ended(self, self._reason or StageLostError(default))


class InlineUnit:
    can_restart = False

    def __init__(self, replicas: list[ReplicaHandle], owner: UnitOwner, log: LogSettings) -> None:
        self.replicas = replicas
        self.restarts = RestartHistory(replicas[0].stage.restart)
        self._owner = owner
        self._log = log
        self._host: ReplicaHost | None = None
        self._alive = len(replicas)
        self._given_up = False
        self._stopping = False
        self._ended = asyncio.Event()

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def send(message: Message, frames: Sequence[Any] = ()) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits for this.
                loop.call_soon_threadsafe(self._on_message, message, frames)

        launches = [
            ReplicaLaunch(stage=replica.stage, replica_id=replica.replica_id)
            for replica in self.replicas
        ]
        self._host = ReplicaHost(launches, send, _no_ranks, inline=True, log=self._log)
        self._host.start()
        self.poll()

    def send(self, message: Message, frames: Sequence[Any] = ()) -> None:
        assert self._host is not None
        self._host.deliver(message, frames)

    def poll(self) -> None:
        if self._host is not None and not self._given_up:
            self._owner.unit_message(self, Heartbeat(statuses=self._host.statuses()), ())

    def kill(self, reason: OmniError) -> None:
        """A thread cannot be killed: it is told to stop, and the unit is lost for good."""
        if not self._given_up:
            self._given_up = True
            self.send(Shutdown())
            self._owner.unit_ended(self, reason)

    async def stop(self, timeout_s: float) -> None:
        self._stopping = True
        if self._host is None:
            return
        self.send(Shutdown())
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            names = ", ".join(repr(replica.stage.name) for replica in self.replicas)
            raise StageLostError(
                f"a thread of stage {names} did not end within {timeout_s:g} s; it ends with this "
                "process"
            ) from None

    def _on_message(self, message: Message, frames: Sequence[Any]) -> None:
        if isinstance(message, Stopped | StartFailed):
            self._alive -= 1
        if not self._given_up:
            self._owner.unit_message(self, message, frames)
        if self._alive == 0:
            self._ended.set()
            if not (self._given_up or self._stopping):
                self._given_up = True
                self._owner.unit_ended(self, StageLostError("this stage has ended"))


def _no_ranks(*_: Any) -> None:
    raise AssertionError("inline replicas have one rank")
