"""Two ranks that share each sequence (Ulysses) make the picture that one makes."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.contracts.tensors import host_tensor
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver, diffusion_request, diffusion_stage
from tests.parallel.bench import ReplicaBench, serving

ROUNDING = 1e-5
"""Heads are summed in another order; pixels are in [0, 1]."""
ASKED = {"seed": 3, "num_inference_steps": 2, "height": 32, "width": 64, "output_type": "np"}


def shared(family):
    parallel = ParallelConfig(sequence_parallel_size=2)
    return diffusion_stage(checkpoint(family), parallel=parallel, devices=("cpu",) * 2)


def lengths_seen(transformer):
    """Of the leader's share of the picture's sequence, in each attention."""
    lengths = []
    for block in transformer.transformer_blocks:
        block.attn.register_forward_pre_hook(
            lambda module, args, kwargs: lengths.append(kwargs["hidden_states"].shape[1]),
            with_kwargs=True,
        )
    return lengths


def pixels(answer):
    return host_tensor(answer.tensors["images"]).numpy()


@pytest.mark.invariant("PARALLEL-INV-002")
@pytest.mark.parametrize("family", ["flux", "qwen_image"])
def test_a_shared_sequence_gives_the_same_picture(family):
    driver = Driver(checkpoint(family))
    whole = lengths_seen(driver.pipeline.transformer)
    with serving(shared(family)) as bench:
        lengths = lengths_seen(bench.replica._executor._variants.base.transformer)
        for name, prompt in {"even": "a red cat", "odd": "one red cat on a mat"}.items():
            bench.submit(name, prompt, **ASKED)
            ours = pixels(bench.answers(1)[name])
            expected = pixels(driver.run(diffusion_request(prompt, **ASKED)))
            assert expected.std() > 0.05
            assert {2 * length for length in lengths} == set(whole)
            assert np.abs(ours - expected).max() < ROUNDING
            other = pixels(driver.run(diffusion_request(prompt, **{**ASKED, "seed": 4})))
            assert np.abs(ours - other).max() > 1000 * ROUNDING


@pytest.mark.invariant("PARALLEL-INV-004")
def test_a_model_without_a_plan_is_refused_by_name():
    bench = ReplicaBench(shared("sd15"))
    with pytest.raises(UnsupportedCombinationError, match=r"UNet2DConditionModel.*_cp_plan"):
        bench.start()
    bench.replica._thread.join(20)
    assert not bench.replica._thread.is_alive()
