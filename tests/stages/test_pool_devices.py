"""Replicas get the devices that are theirs."""

from __future__ import annotations

from omnistage.stages.pool import StagePool
from tests.config.pipelines import resolve


def test_each_replica_has_its_own_devices() -> None:
    gpus = tuple(f"cuda:{index}" for index in range(4))
    config = resolve(accelerators=gpus, tensor_parallel_size=2, num_replicas=2)
    pool = StagePool(config.stages[0], config.lb_policy)
    assert [replica.stage.devices for replica in pool.replicas] == [gpus[:2], gpus[2:]]
