"""Step mode against the unmodified pipelines of diffusers: same checkpoint, same seed, float32.

Alone and in a batch with requests of other prompts, lengths, seeds, numbers of steps, guidance and
outputs, which join at other times.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
import torch

from tests.diffusion.concurrent import Concurrent, Outcome
from tests.diffusion.parity_cases import (
    JOINS_AT,
    LIMIT,
    LOUD_STD,
    SEEDS,
    SHARED,
    STEP_FAMILIES,
    call_of,
    cases,
    distance,
    limit_of,
    pipeline_of,
    theirs,
)
from tests.diffusion.reference import reference_images

CLEARLY_WRONG = 100 * LIMIT


def stepping(name: str, max_num_seqs: int = 4, in_one_batch: bool = True) -> Concurrent:
    return _stepping(name, max_num_seqs, in_one_batch)


@cache
def _stepping(name: str, max_num_seqs: int, in_one_batch: bool) -> Concurrent:
    return Concurrent(
        name,
        options={"guidance_in_one_batch": in_one_batch},
        diffusion_streaming_output=True,
        step_execution=True,
        max_num_seqs=max_num_seqs,
    )


def together(name: str, output_type: str = "latent", in_one_batch: bool = True) -> Outcome:
    """All cases of a family, of which at least three share steps at some time."""
    outcome = stepping(name, in_one_batch=in_one_batch).run(cases(name, output_type), JOINS_AT)
    assert max(len(wave) for wave in outcome.waves("step")) >= 3
    return outcome


def distances(outcome: Outcome, name: str, output_type: str = "latent") -> dict[str, float]:
    return {
        case: distance(data.tensors["images"], theirs(name, case, output_type))
        for case, data in outcome.results.items()
    }


@pytest.mark.invariant("MODEL-INV-021")
@pytest.mark.parametrize("in_one_batch", [True, False])
@pytest.mark.parametrize("output_type", ["latent", "np", "pil"])
@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_each_of_a_batch_equals_diffusers(name, output_type, in_one_batch):
    outcome = together(name, output_type, in_one_batch)
    assert not outcome.errors
    found = distances(outcome, name, output_type)
    assert set(found) == set(SHARED)
    assert max(found.values()) <= limit_of(output_type), found


@pytest.mark.invariant("MODEL-INV-021")
@pytest.mark.parametrize("output_type", ["latent", "np", "pil"])
@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_each_alone_equals_diffusers(name, output_type):
    outcome = stepping(name, max_num_seqs=1).run(cases(name, output_type))
    assert {len(wave) for wave in outcome.waves("step")} == {1}
    found = distances(outcome, name, output_type)
    assert set(found) == set(SHARED)
    assert max(found.values()) <= limit_of(output_type), found


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_the_references_are_loud_and_all_different(name):
    latents = {case: theirs(name, case, "latent") for case in SHARED}
    assert all(one.std() >= LOUD_STD for one in latents.values())
    assert all(theirs(name, case, "np").std() >= LOUD_STD for case in SHARED)
    for first, second in combinations(latents.values(), 2):
        assert (first[:1] - second[:1]).abs().max() > CLEARLY_WRONG
    assert (latents["long"][0] - latents["long"][1]).abs().max() > CLEARLY_WRONG


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_progress_is_told_of_every_step(name):
    outcome = together(name)
    for case, shared in SHARED.items():
        total = shared["num_inference_steps"]
        assert outcome.steps[case] == [(step, total) for step in range(1, total + 1)]


# what the comparison sees ----------------------------------------------------------------------


def assert_seen(name: str, *wrong: str) -> None:
    """An injected error that reaches the results of `wrong`, or ends them."""
    outcome = together(name)
    found = distances(outcome, name)
    for case in wrong:
        assert case in outcome.errors or found[case] > CLEARLY_WRONG, (case, found)


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_it_sees_another_seed(name):
    outcome = together(name)
    for case in SHARED:
        other = reference_images(pipeline_of(name), call_of(name, case), SEEDS[case] + 1, "latent")
        assert distance(outcome.results[case].tensors["images"], other) > CLEARLY_WRONG


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_it_sees_a_swap_of_two_prompts(name, monkeypatch):
    family = stepping(name).family
    correct, held = family.prepare, {}

    def swapping(state):
        held[state.identity.request_id] = state
        if {"plain", "long"} <= set(held):
            first, second = held.pop("plain"), held.pop("long")
            first.branches, second.branches = second.branches[:1], first.branches[:1]
            family.forget_batches()
        correct(state)

    monkeypatch.setattr(family, "prepare", swapping)
    assert_seen(name, "plain", "long")


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_it_sees_a_text_that_is_one_token_short(name, monkeypatch):
    family = stepping(name).family
    correct = family.encode

    def shortened(prompts):
        return [
            {**one, "embeds": one["embeds"][:, : one["embeds"].shape[1] - 1]}
            for one in correct(prompts)
        ]

    monkeypatch.setattr(family, "encode", shortened)
    assert_seen(name, *SHARED)


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_it_sees_a_step_index_that_is_off_by_one(name, monkeypatch):
    family = stepping(name).family
    correct = family.denoise_step

    def one_ahead(states):
        late = [one for one in states if one.identity.request_id == "long" and one.step_index == 2]
        for state in late:
            state.step_index += 1
        predictions = correct(states)
        for state in late:
            state.step_index -= 1
        return predictions

    monkeypatch.setattr(family, "denoise_step", one_ahead)
    assert_seen(name, "long")


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_it_sees_a_scheduler_that_requests_share(name, monkeypatch):
    family = stepping(name).family
    monkeypatch.setattr(family, "own_scheduler", lambda state: family.pipeline.scheduler)
    assert_seen(name, "plain", "long")


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_it_sees_guidance_with_anothers_scale(name, monkeypatch):
    family = stepping(name).family
    correct = family.guide
    scale = "guidance_scale" if name == "sd35" else "true_cfg_scale"

    def guided(state, predictions):
        kept = state.arguments[scale]
        state.arguments[scale] = kept + 0.5
        try:
            return correct(state, predictions)
        finally:
            state.arguments[scale] = kept

    monkeypatch.setattr(family, "guide", guided)
    assert_seen(name, "long", "late")


# previews --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_the_last_predicted_clean_latent_is_the_result(name, monkeypatch):
    family = stepping(name).family
    correct, seen = family.step_scheduler, {}

    def checked(state, prediction):
        clean = family.predict_clean(state, prediction)
        correct(state, prediction)
        if state.step_index == state.total_steps:
            assert state.scheduler.sigmas[-1] == 0
            seen[state.identity.request_id] = distance(clean, state.latents)

    monkeypatch.setattr(family, "step_scheduler", checked)
    together(name)
    assert set(seen) == set(SHARED)
    assert max(seen.values()) <= LIMIT, seen


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_previews_show_where_diffusers_own_steps_point(name, monkeypatch):
    """Between two latents of diffusers' call lies a straight line; at sigma 0 it is clean."""
    runtime = stepping(name)
    correct, shown = runtime.family.post_decode, {}

    def watched(states, latents):
        shown.update(
            ((one.identity.request_id, one.step_index), clean)
            for one, clean in zip(states, latents, strict=True)
        )
        return correct(states, latents)

    monkeypatch.setattr(runtime.family, "post_decode", watched)
    outcome = runtime.run(cases(name, "pil", partial_images=2), JOINS_AT)
    for case, shared in SHARED.items():
        total = shared["num_inference_steps"]
        path, sigmas = _path(name, case)
        for number, preview in enumerate(outcome.previews[case]):
            step = preview.fields["step"]
            assert preview.fields["partial_image_index"] == number
            assert 0 < step < total == preview.fields["total_steps"]
            picture = preview.tensors["images"]
            assert (str(picture.dtype), picture.shape) == (
                "uint8",
                outcome.results[case].tensors["images"].shape,
            )
            slope = (path[step] - path[step - 1]) / (sigmas[step] - sigmas[step - 1])
            clean = path[step - 1] - sigmas[step - 1] * slope
            assert distance(shown[case, step], clean) <= 20 * LIMIT
            assert distance(shown[case, step], path[step]) > CLEARLY_WRONG
        assert len(outcome.previews[case]) == 2
        assert distance(
            outcome.results[case].tensors["images"], theirs(name, case, "pil")
        ) <= limit_of("pil")


def _path(name: str, case: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The latents before the first and after every step, and the sigmas of diffusers' call.

    Rows of guidance branches come after those of the outputs.
    """
    pipeline, path = pipeline_of(name), []
    rows = SHARED[case].get("num_images_per_prompt", 1)

    def before_forward(module, args, inputs):
        if not path:
            path.append(inputs["hidden_states"][:rows].clone())

    transformer = pipeline.transformer
    hook = transformer.register_forward_pre_hook(before_forward, with_kwargs=True)

    def after_step(pipe, step, timestep, tensors):
        path.append(tensors["latents"].clone())
        return {}

    call = {**call_of(name, case), "callback_on_step_end": after_step}
    try:
        reference_images(pipeline, call, SEEDS[case], "latent")
    finally:
        hook.remove()
    return path, pipeline.scheduler.sigmas.clone()
