"""Step mode on two ranks that share each sequence: all take the same steps, the first one's count."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import InvalidRequestError
from tests.diffusion.crowd import Crowd
from tests.parallel.bench import serving
from tests.parallel.stepping import SIZE, alone, pixels, step_stage

ROUNDING = 1e-5
"""Heads are summed in another order; pixels are in [0, 1]."""
GUIDED = {"negative_prompt": "bad", "true_cfg_scale": 3.0}
ASKED = {
    "plain": ("a red cat", {"seed": 1, "num_inference_steps": 2}),
    "guided": ("one blue dog on a mat", {"seed": 2, "num_inference_steps": 3, **GUIDED}),
    "taller": ("a red cat", {"seed": 3, "num_inference_steps": 3, "height": 64}),
}


@pytest.mark.invariant("PARALLEL-INV-002")
@pytest.mark.parametrize("family", ["flux", "qwen_image"])
def test_steps_of_a_shared_sequence_give_the_same_pictures(family):
    crowd = Crowd(family, step_execution=True)
    with serving(step_stage(family, ParallelConfig(sequence_parallel_size=2))) as bench:
        for name, (prompt, params) in ASKED.items():
            bench.submit(name, prompt, **{**SIZE, **params})
        bench.submit("wrong", "a red cat", **SIZE, extra_args={"max_sequence_length": 4096})
        answers = bench.answers(4)
        sizes = {len(wave) for wave in bench.waves}
    assert isinstance(answers.pop("wrong"), InvalidRequestError)
    assert max(sizes) > 1
    for name, (prompt, params) in ASKED.items():
        expected = alone(crowd, name, prompt, **{**SIZE, **params})
        assert expected.std() > 0.05
        assert np.abs(pixels(answers[name]) - expected).max() < ROUNDING
