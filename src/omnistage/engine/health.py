"""Whether the engine can serve, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omnistage.stages.pool import ReplicaHandle, StagePool


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """`live`: every stage has a replica that shows life. `ready`: live and taking requests."""

    live: bool
    ready: bool
    reason: str | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)


def describe_pool(pool: StagePool) -> dict[str, Any]:
    return {
        "stage_id": pool.stage.stage_id,
        "name": pool.stage.name,
        "ready": pool.is_ready,
        "replicas": [_describe_replica(replica) for replica in pool.replicas],
    }


def _describe_replica(replica: ReplicaHandle) -> dict[str, Any]:
    status = replica.status
    operation = status.operation if status else None
    return {
        "replica_id": replica.replica_id,
        "state": str(replica.state),
        "note": replica.note,
        "requests": len(replica.bound),
        "operation": operation.kind if operation else None,
        "operation_s": round(operation.elapsed_s, 3) if operation else None,
    }


def engine_health(pools: tuple[StagePool, ...], *, started: bool, draining: bool) -> EngineHealth:
    """Liveness as of now: a replica that is overdue does not count, even before it is killed."""
    stages = [describe_pool(pool) for pool in pools]
    for pool in pools:
        live = [r for r in pool.replicas if r.state == "ready" and r.overdue() is None]
        if not live:
            notes = "; ".join(f"{r.state}: {r.overdue() or r.note}" for r in pool.replicas)
            reason = f"stage {pool.stage.name!r} has no live replica ({notes})"
            return EngineHealth(live=False, ready=False, reason=reason, stages=stages)
    if not started or draining:
        reason = "shutting down" if draining else "starting"
        return EngineHealth(live=True, ready=False, reason=reason, stages=stages)
    return EngineHealth(live=True, ready=True, stages=stages)
