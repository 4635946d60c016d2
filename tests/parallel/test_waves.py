"""Ranks that each serve a request of their own, in one wave."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.tensors import host_tensor
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver, diffusion_request, diffusion_stage
from tests.parallel.bench import serving

SIZE = {"height": 32, "width": 32, "output_type": "np"}
FAMILY = "flux"


def two_ranks(**changes):
    parallel = changes.pop("parallel", ParallelConfig(data_parallel_size=2))
    changes.setdefault("request_batch_max_wait_ms", 5000.0)  # A full wave waits for nothing.
    return diffusion_stage(checkpoint(FAMILY), parallel=parallel, devices=("cpu",) * 2, **changes)


@pytest.fixture(scope="module")
def alone():
    driver = Driver(checkpoint(FAMILY))
    return lambda prompt, **params: driver.run(diffusion_request(prompt, **params))


@pytest.fixture(scope="module")
def bench():
    with serving(two_ranks()) as bench:
        yield bench


def pixels(answer):
    return host_tensor(answer.tensors["images"]).numpy()


@pytest.mark.invariant("PARALLEL-INV-005")
def test_two_requests_of_one_wave_equal_one_process(bench, alone):
    asked = {
        "a": ("a red cat", {"seed": 1, "num_inference_steps": 2}),
        "b": ("a blue dog", {"seed": 2, "num_inference_steps": 3}),
    }
    for name, (prompt, params) in asked.items():
        bench.submit(name, prompt, **params, **SIZE)
    answers = bench.answers(2)
    assert bench.waves == [["a", "b"]]
    for name, (prompt, params) in asked.items():
        expected = pixels(alone(prompt, **params, **SIZE))
        assert np.abs(expected).max() > 0.05
        np.testing.assert_array_equal(pixels(answers[name]), expected)
