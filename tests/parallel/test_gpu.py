"""Two ranks on two GPUs talk by NCCL, and by gloo where tensors are on the host."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.tensors import host_tensor
from omnistage.platforms.presence import visible_accelerators
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver, diffusion_request, diffusion_stage
from tests.parallel.bench import serving

GPUS = visible_accelerators()
ASKED = {"seed": 3, "num_inference_steps": 2, "height": 32, "width": 64, "output_type": "np"}
ROUNDING = 1e-3
"""Kernels of other shapes, in float32 with TF32 off."""

pytestmark = pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")


@pytest.mark.invariant("PARALLEL-INV-002")
@pytest.mark.parametrize("name", ["data", "sequence"])
def test_two_gpus_make_the_picture_of_one(name):
    parallel = ParallelConfig(**{f"{name}_parallel_size": 2})
    driver = Driver(checkpoint("flux"), devices=(GPUS[0],), enforce_eager=True)
    expected = driver.run(diffusion_request("a red cat", **ASKED)).tensors["images"]
    stage = diffusion_stage(
        checkpoint("flux"), parallel=parallel, devices=tuple(GPUS[:2]), enforce_eager=True
    )
    with serving(stage) as bench:
        for request in ("a", "b"):
            bench.submit(request, "a red cat", **ASKED)
        for answer in bench.answers(2).values():
            ours = host_tensor(answer.tensors["images"]).numpy()
            assert np.abs(ours - np.asarray(expected)).max() < ROUNDING
