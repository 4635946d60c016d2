"""One replica in this process, with the test in the engine's place."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.messages import (
    Abort,
    AppendInput,
    Control,
    ControlResult,
    EndInput,
    Message,
    Progress,
    Ready,
    Shutdown,
    Submit,
)
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import GenericParams
from omnistage.stages.replica import Replica
from omnistage.transport.codec import encode
from omnistage.transport.inline import InlineConnector
from tests.toy.deployment import counting, toy_config

M = TypeVar("M", bound=Message)
PATIENCE_S = 20.0


class Workbench:
    """Messages are encoded on their way, as they are between processes, and then kept."""

    def __init__(self, ranks: int = 1, stage_id: int = 0, **changes: Any) -> None:
        stage = toy_config(ranks=ranks, max_num_seqs=1).stages[stage_id]
        topology = dataclasses.replace(
            stage.stage,
            runtime=changes.pop("runtime", "tests.stages.odd_runtime:OddRuntime"),
            input_adapters=changes.pop("input_adapters", {}),
        )
        stage = dataclasses.replace(
            stage,
            stage=topology,
            parallel=ParallelConfig(rank_parallel_size=ranks),
            **changes,
        )
        self.lost_ranks: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._mail: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._connector = InlineConnector()
        self.replica = Replica(
            stage,
            0,
            self._sink,
            lambda replica, rank, code: self.lost_ranks.put(rank),
            connector_kind="auto",
        )

    def _sink(self, message: Message, frames: Sequence[Any] = ()) -> None:
        encode(message, frames)
        self._mail.put(message)

    def next(self) -> Message:
        """The replica's next message, progress left out."""
        while True:
            message = self._mail.get(timeout=PATIENCE_S)
            if not isinstance(message, Progress):
                return message

    def until(self, kind: type[M]) -> M:
        while True:
            message = self.next()
            if isinstance(message, kind):
                return message

    def submit(self, name: str, data: StageData | None = None, **changes: Any) -> RequestIdentity:
        identity = RequestIdentity(request_id=name)
        ref, frames = self._connector.send(data or counting(1))
        message = Submit(
            identity=identity,
            source_stage_id=changes.pop("source_stage_id", None),
            sequence=0,
            payload=ref,
            params=GenericParams(),
            input_complete=changes.pop("input_complete", True),
            credits=changes.pop("credits", 4),
        )
        self.replica.deliver(message, frames)
        return identity

    def append(self, identity: RequestIdentity, sequence: int = 1) -> None:
        ref, frames = self._connector.send(counting(1))
        message = AppendInput(
            identity=identity, source_stage_id=None, sequence=sequence, payload=ref
        )
        self.replica.deliver(message, frames)

    def end(self, identity: RequestIdentity) -> None:
        self.replica.deliver(EndInput(identity=identity))

    def abort(self, identity: RequestIdentity) -> None:
        self.replica.deliver(Abort(identity=identity, reason="test"))

    def call(self, method: str, **arguments: Any) -> ControlResult:
        self.replica.deliver(Control(call_id="1", method=method, arguments=arguments))
        return self.until(ControlResult)

    def held(self) -> dict[str, int]:
        return {name: n for name, n in self.call("held_resources").result.items() if n}

    def stop(self) -> None:
        self.replica.deliver(Shutdown())
        self.replica._thread.join(PATIENCE_S)
        assert not self.replica._thread.is_alive()


@contextmanager
def ready_bench(**changes: Any) -> Iterator[Workbench]:
    bench = Workbench(**changes)
    bench.replica.start()
    try:
        bench.until(Ready)
        yield bench
    finally:
        bench.stop()
