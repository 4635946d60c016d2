"""Qwen-Image-Edit by steps, in a batch, against the unmodified pipelines of diffusers.

Their autoencoder sees a megapixel whatever the picture, hence few and short runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.diffusion.late_pictures import as_output
from tests.checkpoints import FAMILIES
from tests.checkpoints.family import gradient_image
from tests.diffusion.concurrent import Concurrent, Outcome
from tests.diffusion.parity_cases import LIMIT, LOUD_STD, distance, pipeline_of
from tests.diffusion.reference import as_tensor, reference_images, request_of

CLEARLY_WRONG = 100 * LIMIT
EDITORS = ["qwen_image_edit", "qwen_image_edit_plus"]
FLIPPED = gradient_image(48, 32).rotate(180)
CASES: dict[str, dict[str, Any]] = {
    "first": {"prompt": "a red cat"},
    "second": {
        "prompt": "an old dog under the tree",
        "image": FLIPPED,
        "true_cfg_scale": 2.0,
        "num_images_per_prompt": 2,
        "num_inference_steps": 2,
    },
    "third": {"prompt": "dog", "negative_prompt": None, "true_cfg_scale": 1.0},
}
SEEDS = {"first": 7, "second": 8, "third": 9}
JOINS_AT = {"second": 2, "third": 2}


@cache
def editing(name: str) -> Concurrent:
    return Concurrent(name, step_execution=True, max_num_seqs=4)


def call_of(name: str, case: str) -> dict[str, Any]:
    call = {**FAMILIES[name].call, **CASES[case]}
    return {key: value for key, value in call.items() if value is not None}


def edited(name: str, *chosen: str, output_type: str = "latent") -> Outcome:
    requests = {
        case: request_of(call_of(name, case), SEEDS[case], output_type, case) for case in chosen
    }
    return editing(name).run(requests, JOINS_AT)


@cache
def theirs(name: str, case: str, output_type: str) -> Any:
    images = reference_images(pipeline_of(name), call_of(name, case), SEEDS[case], output_type)
    return as_tensor(images).float()


def distances(outcome: Outcome, name: str, output_type: str = "latent") -> dict[str, float]:
    return {
        case: distance(data.tensors["images"], theirs(name, case, output_type))
        for case, data in outcome.results.items()
    }


@pytest.mark.invariant("MODEL-INV-021")
@pytest.mark.parametrize("name", EDITORS)
def test_edits_in_a_batch_equal_diffusers(name):
    outcome = edited(name, *CASES)
    assert set(CASES) in [set(wave) for wave in outcome.waves("step")]
    found = distances(outcome, name)
    assert set(found) == set(CASES)
    assert max(found.values()) <= LIMIT, found
    references = [theirs(name, case, "latent") for case in CASES]
    assert all(one.std() >= LOUD_STD for one in references)
    assert distance(references[0], references[2]) > CLEARLY_WRONG


@pytest.mark.parametrize("name", EDITORS)
def test_edited_pictures_equal_diffusers(name):
    """The same latents make the same picture; those `LIMIT` apart may make pictures further apart,
    for the tiny autoencoder of five levels multiplies differences by up to 30."""
    runtime, case = editing(name), "third"
    correct, states = runtime.family.post_decode, []

    def watched(decoded, latents):
        states.extend(decoded)
        return correct(decoded, latents)

    runtime.family.post_decode = watched
    try:
        outcome = edited(name, case, output_type="np")
    finally:
        del runtime.family.post_decode
    reference = theirs(name, case, "np")
    assert reference.std() >= LOUD_STD
    assert distances(outcome, name, "np")[case] <= 30 * LIMIT
    with torch.no_grad():
        (picture,) = correct(states, [theirs(name, case, "latent")])
    assert distance(as_output(picture, "np"), reference) <= LIMIT


@pytest.mark.parametrize("name", EDITORS)
def test_it_sees_another_picture(name, monkeypatch):
    family = editing(name).family
    correct = family.start
    monkeypatch.setattr(
        family, "start", lambda state, channels, pixels: correct(state, channels, pixels.flip(-1))
    )
    found = distances(edited(name, "third"), name)
    assert found["third"] > CLEARLY_WRONG


@pytest.mark.parametrize("name", EDITORS)
def test_it_sees_a_prompt_that_saw_another_picture(name, monkeypatch):
    family = editing(name).family
    correct = family.seen
    monkeypatch.setattr(family, "seen", lambda state: [one.rotate(180) for one in correct(state)])
    found = distances(edited(name, "third"), name)
    assert found["third"] > CLEARLY_WRONG


def test_several_pictures_in_one_sequence_equal_diffusers():
    name = "qwen_image_edit_plus"
    call = call_of(name, "first")
    pictures = [call.pop("image"), gradient_image(32, 40)]
    request = request_of(call, SEEDS["first"], "latent")
    request.data.tensors.update({f"image_{i}": np.asarray(one) for i, one in enumerate(pictures)})
    outcome = editing(name).run({"req": request})
    assert not outcome.errors
    call["image"] = pictures
    reference = reference_images(pipeline_of(name), call, SEEDS["first"], "latent")
    assert distance(outcome.results["req"].tensors["images"], reference) <= LIMIT
    assert distance(theirs(name, "first", "latent"), reference) > CLEARLY_WRONG
