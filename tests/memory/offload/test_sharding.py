"""Who shares weights, told from settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.offload.sharding import check_sharing, needs_equal_waves, share_count
from tests.diffusion.driver import diffusion_stage

HSDP = {"use_hsdp": True, "hsdp_shard_size": 2}


def stage(parallel, **changes):
    config = ParallelConfig(**parallel)
    changes.setdefault("offload", "distributed-layerwise")
    devices = ("cpu",) * config.world_size
    return diffusion_stage("nowhere", parallel=config, devices=devices, **changes)


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-003")
@pytest.mark.parametrize(
    ("parallel", "changes", "count"),
    [
        ({}, {}, 1),
        ({"data_parallel_size": 4}, {}, 4),
        ({"sequence_parallel_size": 2}, {}, 2),
        ({"data_parallel_size": 3, "sequence_parallel_size": 2}, {}, 3),
        ({"tensor_parallel_size": 2}, {}, 1),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, {}, 2),
        ({"data_parallel_size": 4}, {"dlo_use_allgather": False}, 1),
        ({"data_parallel_size": 4}, {"offload": "layerwise"}, 1),
        ({"data_parallel_size": 4}, {"offload": "auto"}, 1),
    ],
)
def test_data_ranks_share_else_sequence_ranks_and_tensor_ranks_never(parallel, changes, count):
    one = stage(parallel, **changes)
    check_sharing(one)
    assert share_count(one) == count
    assert needs_equal_waves(one) == (count > 1)


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-003")
def test_hsdp_and_shares_exclude_each_other():
    check_sharing(stage(HSDP, dlo_use_allgather=False))
    check_sharing(stage(HSDP, offload="layerwise"))
    with pytest.raises(UnsupportedCombinationError, match="--no-dlo-use-allgather"):
        check_sharing(stage(HSDP))


def test_a_scheduler_can_ask_without_torch():
    code = "import sys, omnistage.memory.offload.sharding; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
