"""Stages without processes: the orchestrator's supervisor and replicas, played by the test.

What a replica sends lies on its wire until the test delivers it; a death loses what lies there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import InvalidRequestError, StageLostError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import (
    Abort,
    Aborted,
    Acknowledge,
    AppendInput,
    EndInput,
    Failed,
    InputConsumed,
    Message,
    Output,
    Progress,
    Submit,
)
from omnistage.contracts.outputs import PARTIAL_IMAGE_INDEX
from omnistage.contracts.payloads import PayloadRef
from omnistage.engine.async_omni import AsyncOmni
from omnistage.engine.orchestrator import Orchestrator
from omnistage.engine.request_state import RequestState
from omnistage.observability.metrics import EngineMetrics
from omnistage.stages.pool import ReplicaHandle, ReplicaState, StagePool


@dataclass
class FakeChild:
    identity: RequestIdentity
    credits: int
    complete: bool
    inputs: int = 0
    outputs: int = 0
    previews: int = 0
    """How many of the outputs."""
    ended: bool = False
    unacknowledged: set[int] = field(default_factory=set)

    @property
    def can_emit(self) -> bool:
        return not self.ended and self.credits > 0


class FakeReplica:
    """Checks the orchestrator's side of the protocol while it plays its own."""

    def __init__(self, handle: ReplicaHandle) -> None:
        self.handle = handle
        self.children: dict[RequestKey, FakeChild] = {}
        self.unread: deque[Submit | AppendInput] = deque()
        self.aborts: deque[Abort] = deque()
        self.wire: deque[Message] = deque()

    def receive(self, message: Message) -> None:
        key = message.identity.key  # type: ignore[attr-defined]
        match message:
            case Submit():
                assert PARTIAL_IMAGE_INDEX not in message.payload.fields, "a preview went on"
                assert key not in self.children, f"{key} was submitted twice"
                self.children[key] = FakeChild(
                    message.identity, message.credits, message.input_complete
                )
                self.unread.append(message)
            case AppendInput():
                assert PARTIAL_IMAGE_INDEX not in message.payload.fields, "a preview went on"
                assert not self.children[key].complete, "input after its end"
                self.children[key].complete = message.input_complete
                self.unread.append(message)
            case EndInput():
                assert not self.children[key].complete, "input ended twice"
                self.children[key].complete = True
            case Acknowledge():
                child = self.children[key]
                child.unacknowledged.remove(message.sequence)
                child.credits += 1
                self._drop_if_done(key)
            case Abort():
                self.aborts.append(message)

    def consume(self) -> None:
        message = self.unread.popleft()
        child = self.children.get(message.identity.key)
        if child is not None:
            child.inputs += 1
            self._send(
                InputConsumed(
                    identity=message.identity,
                    source_stage_id=message.source_stage_id,
                    sequence=message.sequence,
                )
            )

    def emit(self, child: FakeChild, *, final: bool) -> None:
        """The next of the child's numbered outputs."""
        fields = {"number": child.outputs - child.previews}
        self._emit(child, PayloadRef(modality="audio", fields=fields), final=final)

    def preview(self, child: FakeChild) -> None:
        fields = {PARTIAL_IMAGE_INDEX: child.previews}
        self._emit(child, PayloadRef(modality="audio", fields=fields), final=False)
        child.previews += 1

    def _emit(self, child: FakeChild, payload: PayloadRef, *, final: bool) -> None:
        self._send(
            Output(identity=child.identity, sequence=child.outputs, payload=payload, final=final)
        )
        child.unacknowledged.add(child.outputs)
        child.outputs += 1
        child.credits -= 1
        child.ended = final

    def progress(self, child: FakeChild) -> None:
        self._send(Progress(identity=child.identity, step=child.outputs, total_steps=99))

    def fail(self, child: FakeChild) -> None:
        error = InvalidRequestError("no").to_record()
        self._send(Failed(identity=child.identity, error=error))
        del self.children[child.identity.key]

    def answer_abort(self) -> None:
        identity = self.aborts.popleft().identity
        self.children.pop(identity.key, None)
        self._send(Aborted(identity=identity))

    def die(self) -> None:
        for held in (self.children, self.unread, self.aborts, self.wire):
            held.clear()

    def _drop_if_done(self, key: RequestKey) -> None:
        child = self.children[key]
        if child.ended and not child.unacknowledged:
            del self.children[key]

    def _send(self, message: Message) -> None:
        self.wire.append(
            msgspec.structs.replace(
                message,
                stage_id=self.handle.stage.stage_id,
                replica_id=self.handle.replica_id,
            )
        )


class FakeStages:
    """In the place of `StageSupervisor`."""

    def __init__(self, config: OmniConfig) -> None:
        self.pools = tuple(StagePool(stage, config.lb_policy) for stage in config.stages)
        self.replicas = [FakeReplica(handle) for pool in self.pools for handle in pool.replicas]
        for replica in self.replicas:
            replica.handle.state = ReplicaState.READY
        self.sent: list[Message] = []

    def send(self, handle: ReplicaHandle, message: Message, frames: Sequence[Any] = ()) -> None:
        if handle.state is ReplicaState.READY:
            address = {"stage_id": handle.stage.stage_id, "replica_id": handle.replica_id}
            self.sent.append(msgspec.structs.replace(message, **address))
            next(r for r in self.replicas if r.handle is handle).receive(message)


class FakeEngine:
    """The orchestrator over fake stages, its loop turned by hand. Needs a running event loop."""

    def __init__(self, config: OmniConfig) -> None:
        self.engine = AsyncOmni(config=config)
        self.stages = FakeStages(config)
        self.orchestrator = Orchestrator(
            config,
            EngineMetrics("fake"),
            self.stages,  # type: ignore[arg-type]
        )
        self.engine._orchestrator = self.orchestrator
        self.engine._started = True

    def turn(self) -> None:
        """Handle all events; one that raises fails the test, where the real loop logs it."""
        while self.orchestrator._inbox:
            self.orchestrator._inbox.popleft()()

    def admit(self, prompt: Any, **options: Any) -> RequestState:
        from omnistage.engine.admission import make_request

        return self.engine._admit(make_request(self.engine.config, prompt, None, **options))

    def deliver(self, replica: FakeReplica) -> None:
        self.orchestrator.stage_message(replica.wire.popleft(), ())

    def lose(self, replica: FakeReplica, *, forever: bool = False) -> None:
        replica.die()
        replica.handle.state = ReplicaState.DOWN if forever else ReplicaState.RESTARTING
        self.orchestrator.replica_lost(replica.handle, StageLostError("lost"))

    def bring_back(self, replica: FakeReplica) -> None:
        replica.handle.state = ReplicaState.READY
        self.orchestrator.replica_ready(replica.handle)

    def assert_nothing_held(self) -> None:
        assert len(self.orchestrator.table) == 0
        assert self.orchestrator.entry.outstanding() == 0
        for pool in self.stages.pools:
            assert not pool._bindings
            assert not any(replica.bound for replica in pool.replicas)
        for replica in self.stages.replicas:
            assert not replica.children
