"""Step mode on ranks that each have requests of their own: nobody notices the others."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.payloads import StageData
from tests.diffusion.crowd import Crowd
from tests.parallel.bench import serving
from tests.parallel.stepping import SIZE, alone, finals, pixels, step_stage

FAMILY = "flux"
GUIDED = {"negative_prompt": "bad", "true_cfg_scale": 3.0}
ASKED = {
    "a": ("a red cat", {"seed": 1, "num_inference_steps": 2}),
    "b": ("a blue dog", {"seed": 2, "num_inference_steps": 5, "partial_images": 2}),
    "c": ("a red cat", {"seed": 3, "num_inference_steps": 4, "height": 64, "partial_images": 1}),
    "d": ("two dogs", {"seed": 4, "num_inference_steps": 3, **GUIDED}),
    "e": ("two cats", {"seed": 5, "num_inference_steps": 3}),
}
TOLERANCE = 1e-5
"""Of pictures made in batches of other sizes."""


@pytest.fixture(scope="module")
def crowd():
    return Crowd(FAMILY, step_execution=True, diffusion_streaming_output=True)


@pytest.fixture(scope="module")
def bench():
    with serving(step_stage(FAMILY, ParallelConfig(data_parallel_size=2))) as bench:
        yield bench


@pytest.mark.invariant("PARALLEL-INV-005")
def test_requests_of_all_ranks_equal_one_process(bench, crowd):
    bench.waves.clear()
    for name, (prompt, params) in ASKED.items():
        bench.submit(name, prompt, **{**SIZE, **params})
    answers, previews = finals(bench, len(ASKED))
    assert max(map(len, bench.waves)) >= 4  # Not one rank's batch of three.
    for name, (prompt, params) in ASKED.items():
        expected = alone(crowd, name, prompt, **{**SIZE, **params})
        assert np.abs(pixels(answers[name]) - expected).max() < TOLERANCE
    numbers = {
        name: [one.fields["partial_image_index"] for one in shown]
        for name, shown in previews.items()
    }
    assert numbers == {"b": [0, 1], "c": [0]}


@pytest.mark.invariant("PARALLEL-INV-005")
@pytest.mark.parametrize("first", [True, False])
def test_a_fault_of_one_ranks_request_is_not_the_others(bench, crowd, first):
    sound = {"seed": 4, "num_inference_steps": 2, **SIZE}
    faulty = {**sound, "extra_args": {"max_sequence_length": 4096}}
    for name in ("faulty", "sound") if first else ("sound", "faulty"):
        bench.submit(name, **(faulty if name == "faulty" else sound))
    answers, _ = finals(bench, 2)
    assert isinstance(answers["faulty"], InvalidRequestError)
    expected = alone(crowd, "sound", "a red cat", **sound)
    assert np.abs(pixels(answers["sound"]) - expected).max() < TOLERANCE


@pytest.mark.invariant("PARALLEL-INV-005")
@pytest.mark.parametrize("first", [True, False])
def test_cancelling_on_one_rank_leaves_the_other(bench, first):
    long = {"seed": 5, "num_inference_steps": 4000, **SIZE}
    names = ("leaving", "staying") if first else ("staying", "leaving")
    asked = {name: bench.submit(name, **long) for name in names}
    bench.until_step("staying", 2)
    bench.abort(asked["leaving"])
    assert finals(bench, 1)[0] == {"leaving": None}
    bench.until_step("staying", 10)
    bench.abort(asked["staying"])
    assert finals(bench, 1)[0] == {"staying": None}
    bench.submit("next", **{**long, "num_inference_steps": 2})
    assert isinstance(finals(bench, 1)[0]["next"], StageData)
    assert bench.replica._executor._steps.num_states == 0
