"""What a request may set in step mode: each choice equals diffusers, or is refused by its name."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError
from tests.diffusion.concurrent import Concurrent
from tests.diffusion.parity_cases import (
    LIMIT,
    STEP_FAMILIES,
    call_of,
    distance,
    pipeline_of,
    theirs,
)
from tests.diffusion.reference import reference_images, request_of

CLEARLY_WRONG = 100 * LIMIT


@cache
def stepping(name: str) -> Concurrent:
    return Concurrent(name, step_execution=True, max_num_seqs=4)


def error_of(name: str, **changes: Any) -> Any:
    """Beside one that must not be hurt."""
    good = request_of(call_of(name, "short"), 9, "latent", "good")
    bad = request_of({**call_of(name, "short"), **changes}, 9, "latent", "bad")
    outcome = stepping(name).run({"good": good, "bad": bad})
    assert distance(outcome.results["good"].tensors["images"], theirs(name, "short", "latent")) <= (
        LIMIT
    )
    assert set(outcome.errors) == {"bad"}
    return outcome.errors["bad"]


@pytest.mark.invariant("MODEL-INV-023")
@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("sd35", "skip_guidance_layers", [0]),
        ("sd35", "skip_layer_guidance_scale", 1.0),
        ("sd35", "mu", 0.5),
        ("sd35", "joint_attention_kwargs", {"scale": 1.0}),
        ("flux", "joint_attention_kwargs", {"scale": 1.0}),
        ("qwen_image", "attention_kwargs", {"scale": 1.0}),
        ("sd35", "prompt_3", ["a", "b"]),
        ("sd35", "clip_skip", "1"),
        ("flux", "negative_prompt_2", ["bad"]),
    ],
)
def test_what_a_family_does_not_handle_is_refused_by_name(name, argument, value):
    error = error_of(name, **{argument: value})
    assert isinstance(error, InvalidRequestError)
    assert error.param == argument
    assert argument in error.message


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_latents_of_the_caller_equal_diffusers(name):
    call = call_of(name, "short")
    start = torch.randn(theirs(name, "short", "latent").shape, generator=torch.manual_seed(3))
    call["latents"] = start
    outcome = stepping(name).run({"req": request_of(call, 5, "latent")})
    reference = reference_images(pipeline_of(name), call, 6, "latent")
    assert distance(outcome.results["req"].tensors["images"], reference) <= LIMIT
    assert distance(theirs(name, "short", "latent"), reference) > CLEARLY_WRONG


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_latents_of_another_shape_are_refused(name):
    shape = theirs(name, "short", "latent").shape
    error = error_of(name, latents=torch.zeros(2, *shape[1:]))
    assert isinstance(error, InvalidRequestError)
    assert error.param == "latents"
    assert str(tuple(shape)) in error.message


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_sigmas_of_the_caller_equal_diffusers(name):
    call = call_of(name, "short") | {"sigmas": [1.0, 0.7, 0.2]}
    outcome = stepping(name).run({"req": request_of(call, 9, "latent")})
    reference = reference_images(pipeline_of(name), call, 9, "latent")
    assert distance(outcome.results["req"].tensors["images"], reference) <= LIMIT
    assert distance(theirs(name, "short", "latent"), reference) > CLEARLY_WRONG


def test_a_shift_of_one_request_equals_diffusers_and_is_its_own():
    name, call = "sd35", call_of("sd35", "short")
    outcome = stepping(name).run(
        {
            "shifted": request_of({**call, "flow_shift": 1.5}, 9, "latent", "shifted"),
            "plain": request_of(call, 9, "latent", "plain"),
            "named": request_of(
                {**call, "scheduler": "FlowMatchEulerDiscreteScheduler"}, 9, "latent", "named"
            ),
        }
    )
    assert {"shifted", "plain", "named"} in [set(wave) for wave in outcome.waves("step")]
    pipeline = pipeline_of(name)
    own = pipeline.scheduler
    pipeline.scheduler = type(own).from_config(own.config, shift=1.5)
    try:
        shifted = reference_images(pipeline, call, 9, "latent")
    finally:
        pipeline.scheduler = own
    plain = theirs(name, "short", "latent")
    assert distance(shifted, plain) > CLEARLY_WRONG
    for case, reference in (("shifted", shifted), ("plain", plain), ("named", plain)):
        assert distance(outcome.results[case].tensors["images"], reference) <= LIMIT


@pytest.mark.parametrize("name", ["flux", "qwen_image"])
def test_a_shift_without_effect_is_refused(name):
    error = error_of(name, flow_shift=1.5)
    assert isinstance(error, UnsupportedCombinationError)
    assert error.param == "flow_shift"


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_other_sizes_take_steps_apart_and_equal_diffusers(name):
    """48 x 32 has as many tokens as 32 x 48."""
    calls = {
        "wide": call_of(name, "short"),
        "tall": {**call_of(name, "short"), "height": 48, "width": 32},
        "large": {**call_of(name, "short"), "height": 48},
    }
    requests = {case: request_of(call, 9, "np", case) for case, call in calls.items()}
    outcome = stepping(name).run(requests)
    assert all(len(wave) == 1 for wave in outcome.waves("step"))
    for case, call in calls.items():
        reference = reference_images(pipeline_of(name), call, 9, "np")
        assert distance(outcome.results[case].tensors["images"], torch.tensor(reference)) <= LIMIT


@pytest.mark.parametrize("name", ["flux", "sd35"])
def test_texts_of_other_maximal_lengths_take_steps_apart_and_equal_diffusers(name):
    """There the padding is attended to."""
    call = call_of(name, "short")
    calls = {"48": call, "40": {**call, "max_sequence_length": 40}}
    outcome = stepping(name).run({n: request_of(one, 9, "latent", n) for n, one in calls.items()})
    assert all(len(wave) == 1 for wave in outcome.waves("step"))
    references = [reference_images(pipeline_of(name), one, 9, "latent") for one in calls.values()]
    assert distance(*references) > LIMIT
    for case, reference in zip(calls, references, strict=True):
        assert distance(outcome.results[case].tensors["images"], reference) <= LIMIT


@pytest.mark.parametrize("name", ["flux", "sd35"])
def test_a_scheduler_that_remembers_steps_equals_diffusers(name, monkeypatch):
    """Each request's own remembers its own steps; such a scheduler makes its sigmas itself."""
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True,
        flow_shift=3.0,
        prediction_type="flow_prediction",
        use_dynamic_shifting=name == "flux",
    )
    runtime, pipeline = stepping(name), pipeline_of(name)
    monkeypatch.setattr(runtime.family.pipeline, "scheduler", scheduler)
    calls = {case: call_of(name, case) for case in ("plain", "short", "late")}
    outcome = runtime.run(
        {case: request_of(call, 9, "latent", case) for case, call in calls.items()}, {"late": 2}
    )
    assert not outcome.errors
    assert any(len(wave) > 1 for wave in outcome.waves("step"))
    for case, call in calls.items():
        monkeypatch.setattr(pipeline, "scheduler", type(scheduler).from_config(scheduler.config))
        reference = reference_images(pipeline, call, 9, "latent")
        assert distance(outcome.results[case].tensors["images"], reference) <= LIMIT
