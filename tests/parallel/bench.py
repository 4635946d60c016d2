"""One replica of a denoising stage with ranks in processes of their own; the test is the engine."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omnistage.contracts.errors import OmniError, from_record
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.messages import (
    Abort,
    Aborted,
    Failed,
    Message,
    Output,
    Progress,
    Ready,
    ReplicaFailed,
    Shutdown,
    StartFailed,
    Submit,
)
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.stages.replica import Replica
from omnistage.transport.inline import InlineConnector
from tests.diffusion.driver import diffusion_request

LOAD_LIMIT_S = 60.0
ANSWER_LIMIT_S = 30.0


class ReplicaBench:
    """`lost` holds the ranks that ended unasked; `waves` the requests of each command."""

    def __init__(self, stage: Any) -> None:
        self.lost: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.progress: list[Progress] = []
        self.waves: list[list[str]] = []
        self._mail: queue.SimpleQueue[tuple[Message, Sequence[Any]]] = queue.SimpleQueue()
        self._connector = InlineConnector()
        self.replica = Replica(
            dataclasses.replace(stage, process="separate"),
            0,
            lambda message, frames=(): self._mail.put((message, [bytes(f) for f in frames])),
            lambda replica, rank, code: self.lost.put(rank),
            connector_kind="inline",
        )
        self.ready: Ready | None = None

    def start(self) -> Ready:
        self.replica.start()
        message, _ = self.next(LOAD_LIMIT_S, (Ready, StartFailed))
        if isinstance(message, StartFailed):
            raise from_record(message.error)
        assert isinstance(message, Ready)
        self.ready = message
        self._note_commands()
        return message

    def _note_commands(self) -> None:
        runner = self.replica._runner
        run = runner.run

        def noted(command: Command) -> Any:
            self.waves.append([one.request_id for one in command.identities])
            return run(command)

        runner.run = noted

    def next(self, limit_s: float, kinds: tuple[type[Message], ...]) -> tuple[Message, Any]:
        give_up = time.monotonic() + limit_s
        while True:
            message, frames = self._mail.get(timeout=max(0.0, give_up - time.monotonic()))
            if isinstance(message, Progress):
                self.progress.append(message)
            if isinstance(message, kinds):
                return message, frames

    def submit(self, name: str, prompt: str = "a red cat", **params: Any) -> RequestIdentity:
        request = diffusion_request(prompt, request_id=name, **params)
        ref, frames = self._connector.send(request.data)
        message = Submit(
            identity=request.identity,
            source_stage_id=None,
            sequence=0,
            payload=ref,
            params=request.params,
            input_complete=True,
            credits=4,
        )
        self.replica.deliver(message, frames)
        return request.identity

    def until_step(self, name: str, step: int) -> None:
        while True:
            message, _ = self.next(ANSWER_LIMIT_S, (Progress,))
            assert isinstance(message, Progress)
            if (message.identity.request_id, message.step) == (name, step):
                return

    def abort(self, identity: RequestIdentity) -> None:
        self.replica.deliver(Abort(identity=identity, reason="test"))

    def answers(self, count: int) -> dict[str, StageData | OmniError | None]:
        """The next `count` ends by request id; None for one that was aborted."""
        found: dict[str, StageData | OmniError | None] = {}
        for _ in range(count):
            kinds = (Output, Failed, Aborted, ReplicaFailed)
            message, frames = self.next(ANSWER_LIMIT_S, kinds)
            if isinstance(message, ReplicaFailed):
                raise from_record(message.error)
            if isinstance(message, Output):
                answer = self._connector.receive(message.payload, frames)
            else:
                answer = from_record(message.error) if isinstance(message, Failed) else None
            found[message.identity.request_id] = answer
        return found

    def stop(self) -> None:
        self.replica.deliver(Shutdown())
        self.replica._thread.join(LOAD_LIMIT_S)
        assert not self.replica._thread.is_alive()


@contextmanager
def serving(stage: Any) -> Iterator[ReplicaBench]:
    bench = ReplicaBench(stage)
    try:
        bench.start()
        yield bench
    finally:
        bench.stop()
