"""Step mode on two ranks that share each sequence: both take the same steps."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import InvalidRequestError, OutOfMemoryError
from tests.diffusion.crowd import Crowd
from tests.parallel.bench import serving
from tests.parallel.step_faults import faulty_stage
from tests.parallel.stepping import SIZE, alone, finals, pixels, step_stage

ROUNDING = 1e-5
"""Heads are summed in another order; pixels are in [0, 1]."""
GUIDED = {"negative_prompt": "bad", "true_cfg_scale": 3.0}
ASKED = {
    "plain": ("a red cat", {"seed": 1, "num_inference_steps": 2}),
    "guided": (
        "one blue dog on a mat",
        {"seed": 2, "num_inference_steps": 3, "partial_images": 1, **GUIDED},
    ),
    "taller": ("a red cat", {"seed": 3, "num_inference_steps": 3, "height": 64}),
}


def check_all(bench, crowd):
    bench.waves.clear()
    for name, (prompt, params) in ASKED.items():
        bench.submit(name, prompt, **{**SIZE, **params})
    bench.submit("wrong", "a red cat", **SIZE, extra_args={"max_sequence_length": 4096})
    answers, previews = finals(bench, 4)
    assert isinstance(answers.pop("wrong"), InvalidRequestError)
    assert max(map(len, bench.waves)) > 1
    assert {name: len(shown) for name, shown in previews.items()} == {"guided": 1}
    for name, (prompt, params) in ASKED.items():
        expected = alone(crowd, name, prompt, **{**SIZE, **params})
        assert np.abs(pixels(answers[name]) - expected).max() < ROUNDING


@pytest.mark.invariant("PARALLEL-INV-002")
def test_texts_of_other_lengths_share_no_pass_where_joint_attention_is_off():
    crowd = Crowd("qwen_image", step_execution=True, diffusion_streaming_output=True)
    with serving(step_stage("qwen_image", ParallelConfig(sequence_parallel_size=2))) as bench:
        check_all(bench, crowd)


@pytest.fixture(scope="module")
def crowd():
    return Crowd("flux", step_execution=True, diffusion_streaming_output=True)


@pytest.fixture(params=["gathered", "whole"], scope="module")
def bench(request):
    """Ranks that also gather their weights, and those that have all of them."""
    offload = {"gathered": "distributed-layerwise", "whole": "none"}[request.param]
    stage = faulty_stage(ParallelConfig(sequence_parallel_size=2), offload=offload)
    with serving(stage) as bench:
        yield bench


@pytest.mark.invariant("PARALLEL-INV-002")
def test_steps_of_a_shared_sequence_give_the_same_pictures(bench, crowd):
    check_all(bench, crowd)


@pytest.mark.invariant("PARALLEL-INV-003")
@pytest.mark.parametrize("what", ["fail:0", "fail:1", "break:all"])
def test_a_fault_ends_its_own_request_only(bench, crowd, what):
    params = {"seed": 4, "num_inference_steps": 4, **SIZE}
    for name, prompt in {"faulty": what, "sound": "a red cat"}.items():
        bench.submit(name, prompt, **params)
    answers, _ = finals(bench, 2)
    assert isinstance(answers["faulty"], OutOfMemoryError)
    expected = alone(crowd, "sound", "a red cat", **params)
    assert np.abs(pixels(answers["sound"]) - expected).max() < ROUNDING


@pytest.mark.invariant("PARALLEL-INV-003")
def test_branches_that_do_not_fit_are_computed_apart_by_all(bench, crowd):
    params = {"seed": 5, "num_inference_steps": 2, **SIZE, **GUIDED}
    bench.submit("a", "large:all", **params)
    expected = alone(crowd, "a", "large:all", **params)
    assert np.abs(pixels(finals(bench, 1)[0]["a"]) - expected).max() < ROUNDING


@pytest.mark.invariant("PARALLEL-INV-003")
def test_a_cancelled_request_leaves_the_others_in_step(bench, crowd):
    params = {"seed": 6, "num_inference_steps": 40, **SIZE}
    leaving = bench.submit("leaving", **params)
    bench.submit("staying", **params)
    bench.until_step("staying", 5)
    bench.abort(leaving)
    answers, _ = finals(bench, 2)
    assert answers["leaving"] is None
    expected = alone(crowd, "staying", "a red cat", **params)
    assert np.abs(pixels(answers["staying"]) - expected).max() < ROUNDING
