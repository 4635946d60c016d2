"""A denoising stage whose ranks share its weights, served: as one process serves it."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import StageLostError
from omnistage.contracts.tensors import host_tensor
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver, diffusion_request
from tests.memory.offload.late_runtime import late_stage
from tests.parallel.bench import serving

SIZE = {"height": 32, "width": 32, "output_type": "np", "num_inference_steps": 2}
ASKED = {"a": ("a red cat", {"seed": 1}), "b": ("a blue dog", {"seed": 2})}
DATA = ParallelConfig(data_parallel_size=2)


def pixels(answer):
    return host_tensor(answer.tensors["images"]).numpy()


@pytest.fixture(scope="module")
def alone():
    drivers = {}

    def pictures(family):
        if family not in drivers:
            driver = Driver(checkpoint(family))
            drivers[family] = {
                name: pixels(driver.run(diffusion_request(prompt, **params, **SIZE)))
                for name, (prompt, params) in ASKED.items()
            }
        return drivers[family]

    return pictures


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-001")
@pytest.mark.parametrize("use_allgather", [True, False])
@pytest.mark.parametrize("family", ["flux", "qwen_image"])
def test_two_requests_at_once_equal_one_process(alone, family, use_allgather):
    stage = late_stage(family, parallel=DATA, dlo_use_allgather=use_allgather)
    with serving(stage) as bench:
        offload = bench.ready.description["offload"]
        assert offload["shares"] == (2 if use_allgather else 1)
        assert offload["strategy"] == "distributed-layerwise"
        for _ in range(2):
            for name, (prompt, params) in ASKED.items():
                bench.submit(name, prompt, **params, **SIZE)
            answers = bench.answers(2)
            for name, expected in alone(family).items():
                np.testing.assert_array_equal(pixels(answers[name]), expected)
        assert bench.waves == [["a", "b"]] * 2


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-001")
def test_ranks_that_share_a_sequence_share_weights_too():
    pictures = []
    for use_allgather in (True, False):
        parallel = ParallelConfig(sequence_parallel_size=2)
        stage = late_stage("flux", parallel=parallel, dlo_use_allgather=use_allgather)
        with serving(stage) as bench:
            assert bench.ready.description["offload"]["shares"] == 1 + use_allgather
            bench.submit("a", "a red cat", seed=1, **SIZE)
            pictures.append(pixels(bench.answers(1)["a"]))
    assert np.abs(pictures[0]).max() > 0.05
    np.testing.assert_array_equal(*pictures)


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-005")
def test_a_rank_that_dies_in_a_step_ends_the_replica_in_time():
    with serving(late_stage("flux", parallel=DATA)) as bench:
        bench.submit("a", "die:1", seed=1, **SIZE)
        with pytest.raises(StageLostError):
            raise bench.answers(1)["a"]


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-002")
def test_what_is_converted_while_loading_is_kept_by_its_share():
    settings = {"quantization_config": "fp8", "dlo_runtime_cache": "off"}
    pictures = {}
    with serving(late_stage("flux", parallel=ParallelConfig(), **settings)) as bench:
        whole = bench.ready.description
        for name, (prompt, params) in ASKED.items():
            bench.submit(name, prompt, **params, **SIZE)
            pictures |= bench.answers(1)
    with serving(late_stage("flux", parallel=DATA, **settings)) as bench:
        shared = bench.ready.description
        for name, (prompt, params) in ASKED.items():
            bench.submit(name, prompt, **params, **SIZE)
        for name, answer in bench.answers(2).items():
            np.testing.assert_array_equal(pixels(answer), pixels(pictures[name]))
    assert shared["quantization"]
    assert shared["offload"]["components"]["transformer"]["host"] == "private"
    assert shared["private_bytes"] <= 0.55 * whole["private_bytes"]


@pytest.mark.invariant("DISTRIBUTED-OFFLOAD-INV-002")
def test_of_the_runtime_cache_each_rank_locks_its_share(alone, tmp_path):
    settings = {"dlo_runtime_cache": "on", "weight_cache_dir": str(tmp_path)}
    for start in range(2):
        with serving(late_stage("flux", parallel=DATA, **settings)) as bench:
            described = bench.ready.description
            for name, (prompt, params) in ASKED.items():
                bench.submit(name, prompt, **params, **SIZE)
            for name, answer in bench.answers(2).items():
                np.testing.assert_array_equal(pixels(answer), alone("flux")[name])
        component = described["offload"]["components"]["transformer"]
        assert component["host"] == "runtime_cache"
        if start:  # The first time, either rank may be the one that fills it.
            assert described["private_bytes"] == 0
        blocks = component["streamed_blocks"]
        assert described["locked_bytes"] <= component["streamed_bytes"] + 2 * 4096 * blocks
        assert component["streamed_bytes"] <= 0.51 * described["offload"]["gathered_bytes"]
