"""Step mode on ranks that gather their weights: every pass of the denoiser is all ranks'."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import OutOfMemoryError
from tests.diffusion.crowd import Crowd
from tests.parallel.bench import serving
from tests.parallel.step_faults import faulty_stage
from tests.parallel.stepping import SIZE, alone, finals, pixels

DATA = ParallelConfig(data_parallel_size=2)
GATHERED = {"offload": "distributed-layerwise"}
GUIDED = {"negative_prompt": "bad", "true_cfg_scale": 3.0}
ASKED = {
    "short": ("a red cat", {"seed": 1, "num_inference_steps": 2}),
    "long": ("a blue dog", {"seed": 2, "num_inference_steps": 6, "partial_images": 2}),
    "tall": ("a red cat", {"seed": 3, "num_inference_steps": 3, "height": 64}),
    "guided": ("two dogs", {"seed": 4, "num_inference_steps": 3, **GUIDED}),
    "fifth": ("two cats", {"seed": 5, "num_inference_steps": 3}),
}
TOLERANCE = 1e-5
"""Of pictures made in batches of other sizes."""
SOUND = {"seed": 6, "num_inference_steps": 4, **SIZE}


@pytest.fixture(scope="module")
def crowd():
    return Crowd("flux", step_execution=True, diffusion_streaming_output=True)


@pytest.fixture(scope="module")
def bench():
    """Guidance branches apart: requests need different numbers of passes a step."""
    stage = faulty_stage(DATA, **GATHERED)
    stage.options["guidance_in_one_batch"] = False
    with serving(stage) as bench:
        assert bench.ready.description["offload"]["shares"] == 2
        yield bench


def check_sound(crowd, answer):
    expected = alone(crowd, "sound", "a red cat", **SOUND)
    assert np.abs(pixels(answer) - expected).max() < TOLERANCE


@pytest.mark.invariant("PARALLEL-INV-003")
def test_requests_with_different_numbers_of_passes_equal_one_process(bench, crowd):
    bench.waves.clear()
    for name, (prompt, params) in ASKED.items():
        bench.submit(name, prompt, **{**SIZE, **params})
    answers, previews = finals(bench, len(ASKED))
    assert max(map(len, bench.waves)) >= 3
    assert len(previews["long"]) == 2
    for name, (prompt, params) in ASKED.items():
        expected = alone(crowd, name, prompt, **{**SIZE, **params})
        assert np.abs(pixels(answers[name]) - expected).max() < TOLERANCE


@pytest.mark.invariant("PARALLEL-INV-003")
@pytest.mark.parametrize("first", [True, False])
def test_one_that_leaves_does_not_hold_up_the_other(bench, crowd, first):
    names = ("leaving", "sound") if first else ("sound", "leaving")
    asked = {name: bench.submit(name, **SOUND | {"num_inference_steps": 60}) for name in names}
    bench.until_step("sound", 2)
    bench.abort(asked["leaving"])
    assert finals(bench, 1)[0] == {"leaving": None}
    bench.until_step("sound", 30)
    bench.abort(asked["sound"])
    assert finals(bench, 1)[0] == {"sound": None}
    bench.submit("next", **SOUND)
    check_sound(crowd, finals(bench, 1)[0]["next"])


@pytest.mark.invariant("PARALLEL-INV-003")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_between_passes_ends_its_own_request_only(bench, crowd, rank):
    names = ("faulty", "sound") if rank == 0 else ("sound", "faulty")
    for name in names:
        bench.submit(name, f"fail:{rank}" if name == "faulty" else "a red cat", **SOUND)
    answers, _ = finals(bench, 2)
    assert isinstance(answers["faulty"], OutOfMemoryError)
    check_sound(crowd, answers["sound"])


@pytest.mark.invariant("PARALLEL-INV-003")
def test_a_pass_that_fails_on_all_ranks_leaves_them_in_step(bench, crowd):
    bench.submit("first", "break:all", **SOUND)
    bench.submit("second", "break:all", **SOUND)
    answers, _ = finals(bench, 2)
    assert {type(one) for one in answers.values()} == {OutOfMemoryError}
    bench.submit("sound", **SOUND)
    check_sound(crowd, finals(bench, 1)[0]["sound"])
