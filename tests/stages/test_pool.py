"""Who gets a request, who keeps it, and when a replica counts as hung or is given up."""

from __future__ import annotations

import time

import pytest

from omnistage.config.resolved import RestartPolicy
from omnistage.contracts.errors import ConfigurationError
from omnistage.contracts.messages import Operation, ReplicaStatus
from omnistage.stages import units
from omnistage.stages.operations import OperationClock
from omnistage.stages.pool import ReplicaState, StagePool
from omnistage.stages.units import RestartHistory
from tests.toy.deployment import toy_config


def pool_of(replicas: int, policy: str = "least-queue-length") -> StagePool:
    pool = StagePool(toy_config(ranks=1, replicas=replicas).stages[0], policy)
    for replica in pool.replicas:
        replica.state = ReplicaState.READY
        replica.heard(None)
    return pool


def ids(pool: StagePool, count: int) -> list[int]:
    return [pool.bind((f"r{i}", 0)).replica_id for i in range(count)]


def test_the_least_loaded_replica_is_chosen_by_what_still_works() -> None:
    pool = pool_of(2)
    assert ids(pool, 4) == [0, 1, 0, 1]
    pool.relieve(("r1", 0))
    assert pool.bind(("next", 0)).replica_id == 1
    assert pool.binding(("r1", 0)).replica_id == 1


def test_round_robin_takes_turns_and_random_stays_among_the_ready() -> None:
    assert ids(pool_of(3, "round-robin"), 5) == [0, 1, 2, 0, 1]
    pool = pool_of(3, "random")
    pool.replicas[1].state = ReplicaState.RESTARTING
    assert set(ids(pool, 50)) == {0, 2}
    with pytest.raises(ConfigurationError, match="round-robin"):
        pool_of(1, "fastest")


@pytest.mark.invariant("STAGE-INV-100")
def test_a_child_keeps_its_replica_until_it_is_unbound() -> None:
    pool = pool_of(2)
    first = pool.bind(("a", 0))
    first.state = ReplicaState.RESTARTING
    assert pool.bind(("a", 0)) is first
    assert pool.bind(("a", 1), prefer=("a", 0)) is first
    assert pool.bound_keys(first) == [("a", 0), ("a", 1)]
    pool.unbind(("a", 0))
    pool.unbind(("a", 0))
    assert pool.bind(("a", 0)) is not first


def test_waiting_makes_sense_only_while_a_replica_may_come() -> None:
    pool = pool_of(1)
    (replica,) = pool.replicas
    for state in ReplicaState:
        replica.state = state
        assert pool.can_recover == (state not in ("down", "stopped"))
        assert (pool.bind(("x", 0)) is not None) == (state == "ready")
        pool.unbind(("x", 0))


@pytest.mark.invariant("STAGE-INV-203")
def test_a_replica_is_overdue_by_silence_or_by_its_operation() -> None:
    (replica,) = pool_of(1).replicas
    assert replica.overdue() is None
    operation = Operation(kind="step", elapsed_s=31.0, limit_s=30.0)
    status = ReplicaStatus(stage_id=0, replica_id=0, running=1, waiting=0, operation=operation)
    replica.heard(status)
    assert "'step'" in (replica.overdue() or "")
    replica.heard(None)
    replica.status_at = time.monotonic() - 11.0
    assert "no sign of life" in (replica.overdue() or "")
    replica.state, replica.status = ReplicaState.STARTING, None
    assert replica.overdue() is None, "a start has its own limit"


def test_the_clock_knows_each_operations_limit() -> None:
    clock = OperationClock({"forward": 1.0, "compile": 900.0})
    assert clock.snapshot() is None
    clock.touch()
    assert clock.snapshot() is None
    clock.begin("compile")
    assert clock.snapshot().limit_s == 900.0
    clock.begin("something new")
    assert clock.snapshot().limit_s == 1.0
    clock.touch()
    assert clock.snapshot().kind == "something new"
    clock.idle()
    assert clock.snapshot() is None
    assert clock.longest_limit_s == 900.0


@pytest.mark.invariant("STAGE-INV-204")
def test_backoff_doubles_up_to_its_bound_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(units.time, "monotonic", lambda: now)
    history = RestartHistory(
        RestartPolicy(max_restarts=4, window_s=100.0, backoff_s=1.0, max_backoff_s=5.0)
    )
    assert [history.next_backoff_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, None]
    now = 101.0
    assert history.next_backoff_s() == 1.0, "old deaths are forgotten"
    many = RestartHistory(RestartPolicy(max_restarts=3000, window_s=1e9))
    assert [many.next_backoff_s() for _ in range(2500)][-1] == 30.0
