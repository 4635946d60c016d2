"""A rank that is not the leader: executes the leader's commands in order, decides nothing."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import zmq

from omnistage.contracts.errors import (
    DeadlineExceededError,
    InternalError,
    OmniError,
    ProtocolError,
    RequestCancelledError,
    StageLostError,
    as_omni_error,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import (
    Message,
    RankCommand,
    RankHello,
    RankLoad,
    RankProgress,
    RankRelease,
    RankResult,
    RankStop,
    RankVerdict,
    ToRank,
)
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import OUTPUT_LANE, Command, Executor, JoinsRanks
from omnistage.observability.logging import configure_logging, get_logger, request_scope
from omnistage.stages.commands import log_scope
from omnistage.stages.imports import load_object
from omnistage.stages.launch import RankLaunch, end_with_parent, read_launch
from omnistage.stages.operations import OperationClock
from omnistage.stages.ranks import ABANDONED
from omnistage.transport.codec import MessageDecoder, encode
from omnistage.transport.inline import InlineConnector

logger = get_logger("omnistage.stages.rank_process")  # Here __name__ is "__main__".


class LeaderLink:
    """The rank's end of the `PAIR` socket."""

    def __init__(self, launch: RankLaunch) -> None:
        self._decoder = MessageDecoder(ToRank)
        self.connector = InlineConnector()
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 1000)
        for option in (zmq.SNDHWM, zmq.RCVHWM):  # Bounded by the checkpoints of one command.
            self._socket.setsockopt(option, 0)
        self._socket.connect(launch.endpoint)
        self.send(RankHello(rank=launch.rank, token=launch.token, pid=os.getpid()))

    def send(self, message: Message, frames: list[Any] | None = None) -> None:
        self._socket.send_multipart(encode(message, frames or ()))

    def receive(self, limit_s: float | None = None) -> tuple[ToRank, list[memoryview]]:
        """Between commands the wait is bounded by the lifeline, inside one by `limit_s`."""
        if limit_s is not None and not self._socket.poll(int(limit_s * 1000)):
            raise DeadlineExceededError(f"the leader sent no verdict within {limit_s:.0f} s")
        return self._decoder.decode(self._socket.recv_multipart())

    def has_mail(self) -> bool:
        return bool(self._socket.poll(0))

    def close(self) -> None:
        self._socket.close()


class RankContext:
    """`ExecutionContext` of a rank that follows: its checkpoints wait for the leader's verdict."""

    def __init__(self, link: LeaderLink, clock: OperationClock, launch: RankLaunch) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._link = link
        self._clock = clock
        self._sequence = 0
        self._checkpoint = 0
        self._lockstep = True
        self._cancelled: frozenset[RequestKey] = frozenset()

    def start(self, sequence: int, *, lockstep: bool) -> None:
        self._sequence, self._checkpoint = sequence, 0
        self._lockstep, self._cancelled = lockstep, frozenset()

    def is_stale(self, message: object) -> bool:
        """A verdict on a command that this rank has already answered, by an error of its own."""
        return isinstance(message, RankVerdict) and message.sequence <= self._sequence

    def checkpoint(self) -> frozenset[RequestKey]:
        self._clock.touch()
        if self._lockstep:
            self._read_verdict()
        else:
            while self._link.has_mail():
                self._read_verdict()
        return self._cancelled

    def _read_verdict(self) -> None:
        verdict, _ = self._link.receive(self._clock.longest_limit_s)
        if not isinstance(verdict, RankVerdict) or verdict.sequence != self._sequence:
            raise ProtocolError(f"expected a verdict on command {self._sequence}, got {verdict!r}")
        if verdict.checkpoint == ABANDONED:
            raise RequestCancelledError("the leader gave this command up")
        if verdict.checkpoint != self._checkpoint:
            raise ProtocolError(f"expected checkpoint {self._checkpoint}, got {verdict!r}")
        self._checkpoint += 1
        self._cancelled = frozenset(identity.key for identity in verdict.cancelled)

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        self._link.send(RankProgress(identity=identity, step=step, total_steps=total_steps))

    def operation(self, kind: str) -> None:
        self._clock.begin(kind)

    def finish_later(
        self, identity: RequestIdentity, work: Callable[[], StageData], lane: str = OUTPUT_LANE
    ) -> None:
        pass


def execute(
    executor: Executor,
    context: RankContext,
    link: LeaderLink,
    message: RankCommand,
    frames: list[memoryview],
    stage_id: int,
) -> None:
    context.start(message.sequence, lockstep=message.lockstep)
    command = Command(
        name=message.name,
        identities=message.identities,
        lockstep=message.lockstep,
        data=link.connector.receive(message.payload, frames),
    )
    with request_scope(log_scope(command), stage_id):
        try:
            result: StageData = executor.execute(command, context)
            ref, out_frames = link.connector.send(result)
        except ProtocolError:
            raise
        except Exception as error:
            _answer_error(link, context.rank, message.sequence, error)
            if isinstance(error, StageLostError):
                raise  # Its end tells the leader at once, who may be waiting for it elsewhere.
            return
    link.send(RankResult(rank=context.rank, sequence=message.sequence, payload=ref), out_frames)


def _answer_error(link: LeaderLink, rank: int, sequence: int, error: Exception) -> None:
    omni_error: OmniError = as_omni_error(error, detail=traceback.format_exc())
    if isinstance(omni_error, InternalError):
        logger.error("rank %d failed: %s", rank, omni_error.detail)
    link.send(RankResult(rank=rank, sequence=sequence, error=omni_error.to_record()))


def serve(launch: RankLaunch, link: LeaderLink) -> None:
    """The rank's one loop."""
    executor = _make_executor(launch, link)
    if executor is None:
        while not isinstance(link.receive()[0], RankStop):
            pass  # Its leader reads why, and ends it.
        return
    clock = OperationClock(launch.stage.operation_limits_s)
    context = RankContext(link, clock, launch)
    try:
        while True:
            message, frames = link.receive()
            if isinstance(message, RankCommand):
                execute(executor, context, link, message, frames, launch.stage.stage_id)
            elif isinstance(message, RankLoad):
                if message.rendezvous is not None and isinstance(executor, JoinsRanks):
                    executor.join(message.rendezvous)
                _load(executor, link, launch.rank)
            elif isinstance(message, RankRelease):
                executor.release(message.identity.key)
            elif isinstance(message, RankStop):
                return
            elif not context.is_stale(message):
                raise ProtocolError(f"a verdict outside a command: {message!r}")
    finally:
        executor.close()


def _make_executor(launch: RankLaunch, link: LeaderLink) -> Executor | None:
    """None when the runtime refuses; the leader has been told why, as it would be of a load."""
    try:
        runtime = load_object(launch.stage.stage.runtime)
        executor: Executor = runtime.executor(launch.stage, launch.rank, launch.world_size)
    except Exception as error:
        _answer_error(link, launch.rank, 0, error)
        return None
    return executor


def _load(executor: Executor, link: LeaderLink, rank: int) -> None:
    try:
        description = executor.load(lambda note, fraction: None)
        data = StageData(modality=Modality.HIDDEN, fields=description)
        ref, frames = link.connector.send(data)
    except Exception as error:
        _answer_error(link, rank, 0, error)
        return
    link.send(RankResult(rank=rank, sequence=0, payload=ref), frames)


def main() -> None:
    launch = read_launch(RankLaunch)
    end_with_parent()
    configure_logging(launch.log.level, json=launch.log.json)
    link = LeaderLink(launch)
    try:
        serve(launch, link)
    finally:
        link.close()


if __name__ == "__main__":
    main()
