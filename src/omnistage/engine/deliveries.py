"""Handing payloads to the replicas of a stage, in order, now or when one is ready."""

from __future__ import annotations

import time

import msgspec

from omnistage.config.pipeline import ENTRY, StageConfig
from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import UnavailableError
from omnistage.contracts.messages import AppendInput, EndInput, Submit
from omnistage.contracts.sampling import OmniTokenSamplingParams, SamplingParams
from omnistage.engine.request_state import Child, Delivery, RequestState, StageVisit
from omnistage.stages.pool import ReplicaHandle
from omnistage.stages.supervisor import StageSupervisor

_SEEDS = 2**63


class Deliveries:
    """Used by the orchestrator's loop only; never blocks."""

    def __init__(self, config: OmniConfig, supervisor: StageSupervisor) -> None:
        self._stages = config.stages
        self._supervisor = supervisor

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

    def end_entry(self, child: Child, stage_id: int, epoch: int) -> None:
        """The request's own input to this stage is complete without a further payload."""
        waiting = [d for d in child.waiting if (d.stage_id, d.source_stage_id) == (stage_id, None)]
        if waiting:
            waiting[-1].last = True
            return
        visit = child.visits[stage_id]
        visit.open_sources.discard(ENTRY)
        replica = self._supervisor.pools[stage_id].binding(child.key)
        if replica is not None and visit.submitted and not visit.open_sources:
            self._supervisor.send(replica, EndInput(identity=child.identity, epoch=epoch))

    @staticmethod
    def visit(child: Child, stage: StageConfig) -> StageVisit:
        if stage.stage_id not in child.visits:
            child.visits[stage.stage_id] = StageVisit(open_sources=set(stage.input_sources))
        return child.visits[stage.stage_id]

    def _hand_over(
        self, state: RequestState, child: Child, replica: ReplicaHandle, delivery: Delivery
    ) -> None:
        stage = self._stages[delivery.stage_id]
        visit = self.visit(child, stage.stage)
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
            params=_own_params(state.request.sampling_params[delivery.stage_id], child),
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


def _own_params(params: SamplingParams, child: Child) -> SamplingParams:
    """Answer i of several draws from `seed + i`."""
    if not isinstance(params, OmniTokenSamplingParams) or params.seed is None or not child.group:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + child.group) % _SEEDS)
