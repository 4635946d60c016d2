"""A replica process: its main thread moves messages and beats the heart, nothing else.

The executing threads hand their messages over an in-process `PUSH`/`PULL` pair, since a ZeroMQ
socket belongs to one thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from omnistage.contracts.errors import StageLostError
from omnistage.contracts.messages import (
    Heartbeat,
    Hello,
    Message,
    ReplicaFailed,
    StartFailed,
    Stopped,
    ToReplica,
)
from omnistage.observability.logging import configure_logging, get_logger
from omnistage.stages.host import ReplicaHost
from omnistage.stages.launch import (
    RANK_LOST_EXIT_CODE,
    REPLICA_FAILED_EXIT_CODE,
    ProcessLaunch,
    describe_exit,
    end_with_parent,
    read_launch,
)
from omnistage.stages.replica import Replica
from omnistage.transport.codec import MessageDecoder, encode

logger = get_logger("omnistage.stages.replica_process")  # Here __name__ is "__main__".

_OUTBOX = "inproc://outbox"
_ZERO_COPY_BYTES = 65_536
_FLUSH_MS = 2000
_GOES_ON, _REPLICA_ENDED, _PROCESS_ENDS = b"\0", b"\1", b"\2"


class Outbox:
    """Where threads put messages for the engine. The first frame tells the loop what follows."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self._local = threading.local()

    def __call__(self, message: Message, frames: Sequence[Any] = ()) -> None:
        socket = getattr(self._local, "socket", None)
        if socket is None:
            socket = self._local.socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(_OUTBOX)
        parts = [_effect_of(message), *encode(message, frames)]
        socket.send_multipart(parts, copy=sum(map(len, parts)) < _ZERO_COPY_BYTES)


def _effect_of(message: Message) -> bytes:
    if isinstance(message, ReplicaFailed | StartFailed):
        return _PROCESS_ENDS
    return _REPLICA_ENDED if isinstance(message, Stopped) else _GOES_ON


class ReplicaProcess:
    """The process's one loop: engine ↔ replicas. A replica that fails ends the process, since the
    engine restarts processes, not threads."""

    def __init__(self, launch: ProcessLaunch) -> None:
        self._context = zmq.Context.instance()
        self._decoder = MessageDecoder(ToReplica)
        self._pull = self._socket(zmq.PULL)
        self._pull.bind(_OUTBOX)
        self._engine = self._socket(zmq.DEALER)
        self._engine.connect(launch.endpoint)
        self._engine.send_multipart(encode(Hello(token=launch.token, pid=os.getpid())))
        self._outbox = Outbox(self._context)
        self._host = ReplicaHost(launch.replicas, self._outbox, self._rank_exited, log=launch.log)
        self._interval_s = launch.heartbeat_interval_s
        self._alive = len(launch.replicas)
        self._exit_code = 0

    def run(self) -> int:
        """Until every replica has ended; the process's exit code."""
        self._host.start()
        poller = zmq.Poller()
        poller.register(self._engine, zmq.POLLIN)
        poller.register(self._pull, zmq.POLLIN)
        next_beat = time.monotonic()
        while self._alive > 0:
            wait_s = max(0.0, next_beat - time.monotonic())
            ready = dict(poller.poll(int(wait_s * 1000) + 1))
            if self._pull in ready:
                self._forward()
            if self._engine in ready:
                message, frames = self._decoder.decode(self._engine.recv_multipart())
                self._host.deliver(message, frames)
            if time.monotonic() >= next_beat:
                self._engine.send_multipart(encode(Heartbeat(statuses=self._host.statuses())))
                next_beat = time.monotonic() + self._interval_s
        if self._exit_code:
            time.sleep(_FLUSH_MS / 1000)  # The engine reads why and kills us; threads may be stuck.
        else:
            self._context.destroy(linger=_FLUSH_MS)
        return self._exit_code

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket

    def _forward(self) -> None:
        effect, *parts = self._pull.recv_multipart(copy=False)
        self._engine.send_multipart(parts, copy=False)
        if effect.bytes == _REPLICA_ENDED:
            self._alive -= 1
        elif effect.bytes == _PROCESS_ENDS:
            self._alive = 0
            self._exit_code = self._exit_code or REPLICA_FAILED_EXIT_CODE

    def _rank_exited(self, replica: Replica, rank: int, code: int) -> None:
        """Called from a watcher thread. The leader may be stuck in a collective with the dead
        rank, so the whole process ends."""
        self._exit_code = RANK_LOST_EXIT_CODE
        name = replica.stage.name
        error = StageLostError(
            f"rank {rank} of stage {name!r} died ({describe_exit(code)}); please retry"
        )
        logger.error("%s", error)
        replica.post(ReplicaFailed(error=error.to_record()))


def main() -> None:
    launch = read_launch(ProcessLaunch)
    end_with_parent()
    configure_logging(launch.log.level, json=launch.log.json)
    code = ReplicaProcess(launch).run()
    os._exit(code)  # Everything is closed; a library's finalizer must not be able to hang us.


if __name__ == "__main__":
    main()
