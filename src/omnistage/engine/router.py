"""Cross-stage routing: where a payload goes next, who has taken it, and when a child is done.

Handles are passed on unread. A producer's payload is acknowledged when everybody it was sent to
has taken it: that frees its memory and returns a credit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from omnistage.config.pipeline import ENTRY, StageConfig
from omnistage.config.resolved import INLINE_PROCESS, OmniConfig
from omnistage.contracts.errors import ProtocolError, UnavailableError
from omnistage.contracts.messages import (
    Acknowledge,
    AppendInput,
    EndInput,
    InputConsumed,
    Output,
    Submit,
)
from omnistage.contracts.payloads import PayloadRef, StageData
from omnistage.engine.joins import join_payloads
from omnistage.engine.request_state import Child, Delivery, RequestState, StageVisit
from omnistage.observability.metrics import EngineMetrics
from omnistage.stages.pool import ReplicaHandle
from omnistage.stages.supervisor import StageSupervisor
from omnistage.transport.registry import make_connector

MAIN_ROLE = "main"
ToClient = Callable[[RequestState, Child, Output, Sequence[Any]], None]


class Router:
    """Used by the orchestrator's loop only; never blocks."""

    def __init__(
        self,
        config: OmniConfig,
        supervisor: StageSupervisor,
        metrics: EngineMetrics,
        to_client: ToClient,
    ) -> None:
        self._pipeline = config.pipeline
        self._stages = config.stages
        self._supervisor = supervisor
        self._metrics = metrics
        self._to_client = to_client
        self._connectors = {
            stage.stage_id: make_connector(
                "inline" if stage.process == INLINE_PROCESS else stage.connector,
                shm_threshold_bytes=stage.shm_threshold_bytes,
            )
            for stage in config.stages
        }
        self._entry_handles: dict[tuple[str, int, int, int], str] = {}

    # inputs -----------------------------------------------------------------------------------

    def enter(
        self, state: RequestState, child: Child, data: StageData, *, last: bool, epoch: int = 0
    ) -> None:
        """Send an input of the request itself to every entry stage that is needed."""
        sequence = child.next_input
        child.next_input += 1
        for stage in self._pipeline.consumers(ENTRY):
            if stage.stage_id not in state.needed:
                continue
            ref, frames = self._connectors[stage.stage_id].send(data)
            if ref.handle is not None:
                self._entry_handles[(*child.key, stage.stage_id, sequence)] = ref.handle
            self.deliver(
                state,
                child,
                Delivery(
                    stage_id=stage.stage_id,
                    source_stage_id=None,
                    sequence=sequence,
                    payload=ref,
                    frames=tuple(frames),
                    last=last,
                    epoch=epoch,
                ),
            )

    def end_input(self, state: RequestState, child: Child, epoch: int) -> None:
        """The streamed input is complete without a further payload."""
        for stage in self._pipeline.consumers(ENTRY):
            visit = child.visits.get(stage.stage_id)
            if visit is None:
                continue
            visit.open_sources.discard(ENTRY)
            replica = self._supervisor.pools[stage.stage_id].binding(child.key)
            if replica is not None and visit.submitted and not visit.open_sources:
                self._supervisor.send(replica, EndInput(identity=child.identity, epoch=epoch))

    def deliver(self, state: RequestState, child: Child, delivery: Delivery) -> None:
        """Hand a payload to the child's replica of a stage, or keep it until one is ready.

        Raises `UnavailableError` when the stage has no replica and will get none.
        """
        pool = self._supervisor.pools[delivery.stage_id]
        queued = any(waiting.stage_id == delivery.stage_id for waiting in child.waiting)
        replica = None if queued else pool.bind(child.key, child.prefer)
        if replica is not None:
            self._hand_over(state, child, replica, delivery)
        elif pool.can_recover:
            child.waiting.append(delivery)
        else:
            raise UnavailableError(f"stage {pool.stage.name!r} is down; restart the server")

    def flush(self, state: RequestState, stage_id: int) -> None:
        """A replica of this stage became ready: send what waited for one."""
        for child in state.children.values():
            ready = [delivery for delivery in child.waiting if delivery.stage_id == stage_id]
            child.waiting = [d for d in child.waiting if d.stage_id != stage_id]
            for delivery in ready:
                self.deliver(state, child, delivery)

    def _hand_over(
        self, state: RequestState, child: Child, replica: ReplicaHandle, delivery: Delivery
    ) -> None:
        stage = self._stages[delivery.stage_id]
        visit = self._visit(child, stage.stage)
        if delivery.last:
            source = ENTRY if delivery.source_stage_id is None else delivery.source_stage_id
            visit.open_sources.discard(source)
        if visit.submitted:
            self._append(child, replica, visit, delivery)
            return
        visit.submitted = True
        visit.started_at = time.monotonic()
        message = Submit(
            identity=child.identity,
            source_stage_id=delivery.source_stage_id,
            sequence=delivery.sequence,
            payload=delivery.payload,
            params=state.request.sampling_params[delivery.stage_id],
            input_complete=not visit.open_sources,
            credits=stage.output_window,
        )
        self._supervisor.send(replica, message, delivery.frames)

    def _append(
        self, child: Child, replica: ReplicaHandle, visit: StageVisit, delivery: Delivery
    ) -> None:
        message = AppendInput(
            identity=child.identity,
            source_stage_id=delivery.source_stage_id,
            sequence=delivery.sequence,
            payload=delivery.payload,
            input_complete=not visit.open_sources,
            epoch=delivery.epoch,
        )
        self._supervisor.send(replica, message, delivery.frames)

    @staticmethod
    def _visit(child: Child, stage: StageConfig) -> StageVisit:
        if stage.stage_id not in child.visits:
            child.visits[stage.stage_id] = StageVisit(open_sources=set(stage.input_sources))
        return child.visits[stage.stage_id]

    # outputs ----------------------------------------------------------------------------------

    def route(
        self, state: RequestState, child: Child, output: Output, frames: Sequence[Any]
    ) -> None:
        """Send one output to the stages that read it and, from a final stage, to the caller.

        Raises `ProtocolError` when its stage skips or repeats a sequence number.
        """
        stage = self._pipeline.stages[output.stage_id]
        visit = child.visits[output.stage_id]
        if output.sequence != visit.next_output or visit.output_final:
            raise ProtocolError(
                f"stage {stage.name!r} sent output {output.sequence} of {child.identity}, "
                f"expected {visit.next_output}"
            )
        visit.next_output += 1
        if output.final:
            visit.output_final = True
            self._supervisor.pools[output.stage_id].relieve(child.key)
        consumers = [
            s for s in self._pipeline.consumers(stage.stage_id) if self._reads(state, child, s)
        ]
        to_client = stage.final_output and self._is_wanted(state, child, stage)
        visit.unpaid[output.sequence] = len(consumers) + int(to_client)
        for consumer in consumers:
            self._forward(state, child, consumer, output, tuple(frames))
        if to_client:
            self._to_client(state, child, output, frames)
        if visit.unpaid.get(output.sequence) == 0:
            self._acknowledge(child, output.stage_id, output.sequence)

    @staticmethod
    def _reads(state: RequestState, child: Child, consumer: StageConfig) -> bool:
        if consumer.stage_id not in state.needed:
            return False
        return consumer.join_companions or child.identity.role == MAIN_ROLE

    @staticmethod
    def _is_wanted(state: RequestState, child: Child, stage: StageConfig) -> bool:
        wanted = state.request.output_modalities
        return child.identity.role == MAIN_ROLE and (
            wanted is None or stage.output_modality in wanted
        )

    def _forward(
        self,
        state: RequestState,
        child: Child,
        consumer: StageConfig,
        output: Output,
        frames: tuple[Any, ...],
    ) -> None:
        if consumer.join_companions and state.roles(child.group) > 1:
            self._join(state, child, consumer, output, frames)
            return
        self.deliver(
            state,
            child,
            Delivery(
                stage_id=consumer.stage_id,
                source_stage_id=output.stage_id,
                sequence=output.sequence,
                payload=output.payload,
                frames=frames,
                last=output.final,
            ),
        )

    def _join(
        self,
        state: RequestState,
        child: Child,
        consumer: StageConfig,
        output: Output,
        frames: tuple[Any, ...],
    ) -> None:
        """Hold a companion's final payload until all of its group are here, then send one."""
        if not output.final:
            raise ProtocolError(
                f"stage {output.stage_id} streams into a join; it must send one final output"
            )
        held = state.joins.setdefault((consumer.stage_id, child.group), {})
        held[child.identity.role] = (child, output, frames)
        if len(held) < state.roles(child.group):
            return
        del state.joins[(consumer.stage_id, child.group)]
        main, main_output, _ = held[MAIN_ROLE]
        payload, all_frames = join_payloads(
            {role: (entry[1].payload, entry[2]) for role, entry in held.items()}
        )
        visit = self._visit(main, consumer)
        visit.joined = [(member, entry.sequence) for member, entry, _ in held.values()]
        self.deliver(
            state,
            main,
            Delivery(
                stage_id=consumer.stage_id,
                source_stage_id=output.stage_id,
                sequence=main_output.sequence,
                payload=payload,
                frames=all_frames,
                last=True,
            ),
        )

    # payment ----------------------------------------------------------------------------------

    def consumed(self, state: RequestState, child: Child, message: InputConsumed) -> None:
        """A stage has copied a payload in."""
        source = message.source_stage_id
        if source is None:
            self._release_entry((*child.key, message.stage_id, message.sequence))
            return
        visit = child.visits[message.stage_id]
        for member, sequence in visit.joined or [(child, message.sequence)]:
            self.pay(member, source, sequence)
        replica = self._supervisor.pools[source].binding(child.key)
        self._metrics.transfer(
            self._stages[source].name,
            replica.replica_id if replica else 0,
            self._stages[message.stage_id].name,
            message.replica_id,
            nbytes=message.nbytes,
            rx_s=message.rx_s,
        )

    def pay(self, child: Child, stage_id: int, sequence: int) -> None:
        """One of the takers of this output has it."""
        visit = child.visits[stage_id]
        if sequence not in visit.unpaid:
            return
        visit.unpaid[sequence] -= 1
        if visit.unpaid[sequence] == 0:
            self._acknowledge(child, stage_id, sequence)

    def pay_all(self, child: Child) -> None:
        """The request ended well: whatever is still unpaid has been taken."""
        for stage_id, visit in child.visits.items():
            for sequence in list(visit.unpaid):
                self._acknowledge(child, stage_id, sequence)

    def _acknowledge(self, child: Child, stage_id: int, sequence: int) -> None:
        del child.visits[stage_id].unpaid[sequence]
        replica = self._supervisor.pools[stage_id].binding(child.key)
        if replica is not None:
            message = Acknowledge(identity=child.identity, sequence=sequence)
            self._supervisor.send(replica, message)

    def receive(self, ref: PayloadRef, frames: Sequence[Any], stage_id: int) -> StageData:
        return self._connectors[stage_id].receive(ref, frames)

    def forget(self, child: Child) -> None:
        """Free what the engine itself holds for this child."""
        for entry in [e for e in self._entry_handles if e[:2] == child.key]:
            self._release_entry(entry)

    def outstanding(self) -> int:
        return sum(connector.outstanding() for connector in self._connectors.values())

    def close(self) -> None:
        for connector in self._connectors.values():
            connector.close()

    def _release_entry(self, entry: tuple[str, int, int, int]) -> None:
        handle = self._entry_handles.pop(entry, None)
        if handle is not None:
            self._connectors[entry[2]].release(handle)
