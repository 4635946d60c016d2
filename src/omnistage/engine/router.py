"""Cross-stage routing: where an output goes next.

Handles are passed on unread. A producer's payload is acknowledged when everybody it was sent to
has taken it (`payments`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from omnistage.config.pipeline import StageConfig
from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import ProtocolError
from omnistage.contracts.messages import InputConsumed, Output
from omnistage.contracts.outputs import PARTIAL_IMAGE_INDEX
from omnistage.engine.deliveries import Deliveries
from omnistage.engine.joins import MAIN_ROLE, join_payloads
from omnistage.engine.payments import Payments
from omnistage.engine.request_state import Child, Delivery, RequestState
from omnistage.observability.metrics import EngineMetrics
from omnistage.stages.supervisor import StageSupervisor

ToClient = Callable[[RequestState, Child, Output, Sequence[Any]], None]


class Router:
    """Used by the orchestrator's loop only; never blocks."""

    def __init__(
        self,
        config: OmniConfig,
        supervisor: StageSupervisor,
        metrics: EngineMetrics,
        deliveries: Deliveries,
        payments: Payments,
        to_client: ToClient,
    ) -> None:
        self._pipeline = config.pipeline
        self._supervisor = supervisor
        self._metrics = metrics
        self._deliveries = deliveries
        self._payments = payments
        self._to_client = to_client

    def route(
        self, state: RequestState, child: Child, output: Output, frames: Sequence[Any]
    ) -> None:
        """Send one output to the stages that read it and, from a final stage, to the caller.

        A preview is for the caller only: it is no piece of what a stage hands on.
        """
        stage = self._pipeline.stages[output.stage_id]
        is_preview = not output.final and PARTIAL_IMAGE_INDEX in output.payload.fields
        consumers = [
            s
            for s in self._pipeline.consumers(stage.stage_id)
            if not is_preview and self._reads(state, child, s)
        ]
        to_client = stage.final_output and self._is_wanted(state, child, stage)
        self._payments.owe(child, output, len(consumers) + int(to_client))
        for consumer in consumers:
            self._forward(state, child, consumer, output, tuple(frames))
        if to_client:
            self._to_client(state, child, output, frames)

    def consumed(self, child: Child, message: InputConsumed) -> None:
        """A stage has copied in what another one made."""
        source = message.source_stage_id
        assert source is not None
        joined = child.visits[message.stage_id].joined.get(source)
        for member, sequence in joined or [(child, message.sequence)]:
            unpaid = self._payments.pay(member, source, sequence)
            if unpaid is not None and member is child:
                self._count_transfer(child, source, message, unpaid.tx_s, unpaid.routed_at)

    def take(self, child: Child, output: Output) -> None:
        """Count an output in, before anything is done with it.

        Raises `ProtocolError` when its stage skips or repeats a sequence number.
        """
        stage = self._pipeline.stages[output.stage_id]
        visit = child.visits.get(output.stage_id)
        if visit is None or output.sequence != visit.next_output or visit.output_final:
            expected = "none" if visit is None or visit.output_final else visit.next_output
            raise ProtocolError(
                f"stage {stage.name!r} sent output {output.sequence} of {child.identity}, "
                f"expected {expected}"
            )
        visit.next_output += 1
        if output.final:
            visit.output_final = True
            self._supervisor.pools[output.stage_id].relieve(child.key)

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
        delivery = Delivery(
            stage_id=consumer.stage_id,
            source_stage_id=output.stage_id,
            sequence=output.sequence,
            payload=output.payload,
            frames=frames,
            last=output.final,
        )
        self._deliveries.deliver(state, child, delivery)

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
        place = (consumer.stage_id, output.stage_id, child.group)
        held = state.joins.setdefault(place, {})
        held[child.identity.role] = (child, output, frames)
        if len(held) < state.roles(child.group):
            return
        del state.joins[place]
        main, main_output, _ = held[MAIN_ROLE]
        payload, all_frames = join_payloads(
            {role: (entry[1].payload, entry[2]) for role, entry in held.items()}
        )
        visit = self._deliveries.visit(main, consumer)
        visit.joined[output.stage_id] = [
            (member, entry.sequence) for member, entry, _ in held.values()
        ]
        delivery = Delivery(
            stage_id=consumer.stage_id,
            source_stage_id=output.stage_id,
            sequence=main_output.sequence,
            payload=payload,
            frames=all_frames,
            last=True,
        )
        self._deliveries.deliver(state, main, delivery)

    def _count_transfer(
        self, child: Child, source: int, message: InputConsumed, tx_s: float, routed_at: float
    ) -> None:
        """In flight: from the engine's passing it on until it was taken in, waiting included."""
        replica = self._supervisor.pools[source].binding(child.key)
        self._metrics.transfer(
            self._pipeline.stages[source].name,
            replica.replica_id if replica else 0,
            self._pipeline.stages[message.stage_id].name,
            message.replica_id,
            nbytes=message.nbytes,
            rx_s=message.rx_s,
            tx_s=tx_s,
            in_flight_s=max(0.0, time.monotonic() - routed_at - message.rx_s),
        )
