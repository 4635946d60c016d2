"""One pool a logical stage: its replicas, their states, and which request sits on which."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import ConfigurationError
from omnistage.contracts.identity import RequestKey
from omnistage.contracts.messages import ReplicaStatus


class ReplicaState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """Dead; its process comes back after a backoff."""
    DOWN = "down"
    """Dead for good: it died too often, or it cannot be restarted."""
    STOPPED = "stopped"


@dataclass(slots=True, kw_only=True)
class ReplicaHandle:
    """What the engine's process knows of one replica."""

    stage: ResolvedStage
    replica_id: int
    state: ReplicaState = ReplicaState.STARTING
    bound: set[RequestKey] = field(default_factory=set)
    status: ReplicaStatus | None = None
    status_at: float = 0.0
    description: dict[str, Any] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    note: str = ""
    """What it is loading, or why it is not ready."""

    @property
    def address(self) -> tuple[int, int]:
        return (self.stage.stage_id, self.replica_id)

    def heard(self, status: ReplicaStatus | None) -> None:
        self.status, self.status_at = status, time.monotonic()

    def overdue(self) -> str | None:
        """Why this replica counts as hung, or None."""
        silence_s = time.monotonic() - self.status_at
        started = self.state is ReplicaState.READY or self.status is not None
        if silence_s > (self.stage.heartbeat_timeout_s if started else self.stage.init_timeout_s):
            return f"no sign of life for {silence_s:.1f} s"
        operation = self.status.operation if self.status else None
        if operation is None:
            return None
        elapsed_s = operation.elapsed_s + silence_s
        if elapsed_s <= operation.limit_s:
            return None
        return (
            f"operation {operation.kind!r} runs for {elapsed_s:.1f} s, "
            f"its limit is {operation.limit_s:.1f} s"
        )


Policy = Callable[[list[ReplicaHandle]], ReplicaHandle]


def _least_queue_length() -> Policy:
    return lambda ready: min(ready, key=lambda replica: len(replica.bound))


def _round_robin() -> Policy:
    turn = -1

    def choose(ready: list[ReplicaHandle]) -> ReplicaHandle:
        nonlocal turn
        turn += 1
        return ready[turn % len(ready)]

    return choose


def _random() -> Policy:
    return random.choice


POLICIES: dict[str, Callable[[], Policy]] = {
    "least-queue-length": _least_queue_length,
    "round-robin": _round_robin,
    "random": _random,
}


class StagePool:
    """Chooses a replica once for each request's child and sticks to it until `unbind`."""

    def __init__(self, stage: ResolvedStage, lb_policy: str) -> None:
        if lb_policy not in POLICIES:
            raise ConfigurationError(
                f"unknown load-balancing policy {lb_policy!r}; allowed: {', '.join(POLICIES)}"
            )
        self.stage = stage
        self.replicas = [
            ReplicaHandle(stage=stage.for_replica(index), replica_id=index)
            for index in range(stage.num_replicas)
        ]
        self._choose = POLICIES[lb_policy]()
        self._bindings: dict[RequestKey, ReplicaHandle] = {}

    def bind(self, key: RequestKey, prefer: RequestKey | None = None) -> ReplicaHandle | None:
        """The replica of this child: the one it has, else the one that `prefer` (a sibling) has,
        else the policy's choice among the ready ones; None when none is ready."""
        bound = self._bindings.get(key)
        if bound is not None:
            return bound
        replica = self._bindings.get(prefer) if prefer is not None else None
        if replica is None:
            ready = [r for r in self.replicas if r.state is ReplicaState.READY]
            if not ready:
                return None
            replica = self._choose(ready)
        self._bindings[key] = replica
        replica.bound.add(key)
        return replica

    def binding(self, key: RequestKey) -> ReplicaHandle | None:
        return self._bindings.get(key)

    def relieve(self, key: RequestKey) -> None:
        """The child's work here is done: it no longer counts as load, the binding stays."""
        replica = self._bindings.get(key)
        if replica is not None:
            replica.bound.discard(key)

    def bound_keys(self, replica: ReplicaHandle) -> list[RequestKey]:
        """Every child that sits on this replica or has left something there."""
        return [key for key, bound in self._bindings.items() if bound is replica]

    def unbind(self, key: RequestKey) -> None:
        replica = self._bindings.pop(key, None)
        if replica is not None:
            replica.bound.discard(key)

    def has(self, *states: ReplicaState) -> bool:
        return any(replica.state in states for replica in self.replicas)

    @property
    def is_ready(self) -> bool:
        return self.has(ReplicaState.READY)

    @property
    def can_recover(self) -> bool:
        """Whether waiting for a replica makes sense."""
        return self.has(ReplicaState.READY, ReplicaState.STARTING, ReplicaState.RESTARTING)
