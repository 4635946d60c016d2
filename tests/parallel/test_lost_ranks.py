"""A rank that is gone, stuck or broken inside a collective step ends its replica, in time."""

from __future__ import annotations

import os
import time

import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import StageLostError
from tests.parallel.bench import serving
from tests.parallel.gathering import gathering_stage
from tests.parallel.step_faults import faulty_stage

SIZE = {"height": 32, "width": 32, "output_type": "np"}
LOST_WITHIN_S = 25.0
"""Two deadlines of five seconds, the end of the processes, and a slow machine."""


def ends_in_time(stage, what):
    with serving(stage) as bench:
        bench.submit("a", what, seed=1, num_inference_steps=2, **SIZE)
        started = time.monotonic()
        with pytest.raises(StageLostError):
            bench.answers(1)
        assert time.monotonic() - started < LOST_WITHIN_S
        (pid,) = bench.ready.rank_pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.invariant("PARALLEL-INV-006")
@pytest.mark.parametrize("what", ["break:1", "die:1", "hang:1", "break:0"])
def test_a_rank_lost_inside_a_step_ends_the_replica(what):
    ends_in_time(gathering_stage(), what)


@pytest.mark.invariant("PARALLEL-INV-006")
def test_so_it_does_in_step_mode():
    parallel = ParallelConfig(data_parallel_size=2)
    ends_in_time(faulty_stage(parallel, offload="distributed-layerwise"), "break:1")
