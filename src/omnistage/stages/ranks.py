"""The leader's side of its ranks: ordered commands out, results in, one failure unit.

Rank 0 lives in the leader's own thread; ranks 1 … N-1 are processes on a `PAIR` socket each. All
methods are called by the leader's executing thread only, except `lost` which any thread may set.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from omnistage.config.plain import to_plain
from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import InternalError, OmniError, StageLostError, from_record
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import (
    FromRank,
    Message,
    RankCommand,
    RankHello,
    RankLoad,
    RankProgress,
    RankRelease,
    RankResult,
    RankStop,
    RankVerdict,
)
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.observability.logging import LogSettings
from omnistage.parallel.rendezvous import Rendezvous
from omnistage.stages.launch import RankLaunch, describe_exit, start_child
from omnistage.transport.codec import MessageDecoder, encode
from omnistage.transport.inline import InlineConnector
from omnistage.transport.sockets import bind_privately, new_token, tokens_match

RANK_MODULE = "omnistage.stages.rank_process"
STOP_GRACE_S = 5.0
ABANDONED = -1
"""As a verdict's checkpoint: the leader's own half failed, the command ends here for all."""
_WAIT_SLICE_MS = 200


class RemoteRank:
    """One rank process and its socket."""

    def __init__(
        self,
        stage: ResolvedStage,
        replica_id: int,
        rank: int,
        log: LogSettings,
        on_exit: Callable[[int, int], None],
        on_progress: Callable[[RankProgress], None],
    ) -> None:
        self.rank = rank
        self._on_progress = on_progress
        self._decoder = MessageDecoder(FromRank)
        self._connector = InlineConnector()
        self._token = new_token()
        self._lost = threading.Event()
        self._stopping = False
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._early: StageData | OmniError | None = None
        launch = RankLaunch(
            endpoint=bind_privately(self._socket),
            token=self._token,
            stage=stage,
            replica_id=replica_id,
            rank=rank,
            world_size=stage.parallel.world_size,
            sys_path=tuple(sys.path),
            log=log,
        )

        def exited(code: int) -> None:
            self._lost.set()
            if not self._stopping:
                on_exit(rank, code)

        self.process: subprocess.Popen[bytes] = start_child(RANK_MODULE, launch, exited)

    def send(self, parts: list[Any]) -> None:
        try:
            self._socket.send_multipart(parts, flags=zmq.NOBLOCK)
        except zmq.Again:
            raise self._gone("does not take messages") from None

    def receive(
        self, limit_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> tuple[FromRank, list[memoryview]]:
        """The rank's next message within `limit_s` seconds, else `StageLostError`. `on_wait` is
        called now and then meanwhile."""
        give_up = time.monotonic() + limit_s
        while not self._socket.poll(_WAIT_SLICE_MS):
            on_wait()
            if self._lost.is_set():
                raise self._gone("died")
            if time.monotonic() > give_up:
                raise self._gone(f"did not answer within {limit_s:.0f} s")
        return self._decoder.decode(self._socket.recv_multipart())

    def early_error(self, sequence: int) -> OmniError | None:
        """The error by which this rank has ended command `sequence` already, if it has."""
        while self._early is None and self._socket.poll(0):
            self._early = self._read_answer(sequence, 0.0)
        return self._early if isinstance(self._early, OmniError) else None

    def result(
        self, sequence: int, limit_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> StageData | OmniError:
        early, self._early = self._early, None
        return early if early is not None else self._read_result(sequence, limit_s, on_wait)

    def _read_result(
        self, sequence: int, limit_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> StageData | OmniError:
        while (answer := self._read_answer(sequence, limit_s, on_wait)) is None:
            on_wait()  # The rank shows life, so that the limit starts anew.
        return answer

    def _read_answer(
        self, sequence: int, limit_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> StageData | OmniError | None:
        """None for a report of progress, which has been passed on."""
        message, frames = self.receive(limit_s, on_wait)
        if isinstance(message, RankProgress):
            self._on_progress(message)
            return None
        if not isinstance(message, RankResult) or message.sequence != sequence:
            raise InternalError(f"rank {self.rank} answered out of order: {message!r}")
        if message.error is not None:
            return from_record(message.error)
        assert message.payload is not None
        return self._connector.receive(message.payload, frames)

    def expect_hello(self, limit_s: float) -> None:
        message, _ = self.receive(limit_s)
        if not isinstance(message, RankHello) or not tokens_match(message.token, self._token):
            raise InternalError(f"rank {self.rank} did not prove who it is")

    def ask_to_stop(self) -> None:
        self._stopping = True
        if not self._socket.closed:
            with contextlib.suppress(zmq.Again):  # Nobody listens: `end` does without.
                self._socket.send_multipart(encode(RankStop()), flags=zmq.NOBLOCK)

    def end(self, give_up: float) -> None:
        """Wait for the process until `give_up` (monotonic seconds), then use force. Idempotent."""
        try:
            self.process.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_GRACE_S)
        finally:
            self._socket.close(linger=0)

    def _gone(self, what: str) -> StageLostError:
        code = self.process.poll()
        how = "" if code is None else f" ({describe_exit(code)})"
        return StageLostError(f"rank {self.rank} of this stage {what}{how}; please retry")


class RankGroup:
    """The remote ranks of one replica; empty for a replica of one rank."""

    def __init__(
        self,
        stage: ResolvedStage,
        replica_id: int,
        log: LogSettings,
        on_exit: Callable[[int, int], None],
        on_progress: Callable[[RankProgress], None] = lambda report: None,
    ) -> None:
        self._stage = stage
        self._sequence = 0
        self._connector = InlineConnector()
        self._rendezvous: Rendezvous | None = None
        self._remotes = [
            RemoteRank(stage, replica_id, rank, log, on_exit, on_progress)
            for rank in range(1, stage.parallel.world_size)
        ]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(remote.process.pid for remote in self._remotes)

    def open_rendezvous(self) -> str | None:
        """The address where all ranks can meet, the leader's own included; None for one rank."""
        if self._remotes:
            self._rendezvous = Rendezvous(self._stage.init_timeout_s)
        return self._rendezvous and self._rendezvous.address

    def begin_load(self) -> None:
        config = to_plain(self._stage)
        for remote in self._remotes:
            remote.expect_hello(self._stage.init_timeout_s)
        address = self._rendezvous and self._rendezvous.address
        self._send_all(RankLoad(config=config, rendezvous=address))

    def finish_load(self) -> None:
        for remote in self._remotes:
            outcome = remote.result(0, self._stage.init_timeout_s)
            if isinstance(outcome, OmniError):
                raise outcome

    def broadcast(self, command: Command) -> None:
        """Number the command and send it to every remote rank.

        Raises `InvalidRequestError` when its data cannot travel; then no rank has seen it.
        """
        if not self._remotes:
            return
        ref, frames = self._connector.send(command.data)
        message = RankCommand(
            sequence=self._sequence + 1,
            name=command.name,
            identities=command.identities,
            payload=ref,
            lockstep=command.lockstep,
        )
        self._send_all(message, frames)
        self._sequence += 1

    def verdict(self, checkpoint: int, cancelled: Iterable[RequestIdentity]) -> None:
        self._send_all(
            RankVerdict(sequence=self._sequence, checkpoint=checkpoint, cancelled=tuple(cancelled))
        )

    def abandon(self) -> None:
        self.verdict(ABANDONED, ())

    def raise_early_error(self) -> None:
        """Raise what a rank has reported before its turn: the leader need not go on alone."""
        for remote in self._remotes:
            error = remote.early_error(self._sequence)
            if error is not None:
                raise error

    def gather(
        self, limit_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> list[StageData | OmniError]:
        """The remote ranks' results of the last command, by rank from 1. `on_wait` is called now
        and then while one is missing."""
        return [remote.result(self._sequence, limit_s, on_wait) for remote in self._remotes]

    def release(self, key: RequestKey) -> None:
        self._send_all(RankRelease(identity=RequestIdentity(request_id=key[0], child_index=key[1])))

    def _send_all(self, message: Message, frames: Sequence[Any] = ()) -> None:
        if self._remotes:
            parts = encode(message, frames)
            for remote in self._remotes:
                remote.send(parts)

    def stop(self) -> None:
        """End all rank processes. Idempotent."""
        give_up = time.monotonic() + STOP_GRACE_S
        for remote in self._remotes:
            remote.ask_to_stop()
        for remote in self._remotes:
            remote.end(give_up)
        if self._rendezvous is not None:
            self._rendezvous.close()
