"""Qwen-Image-Edit by steps, in a batch, against the unmodified pipelines of diffusers.

Their autoencoder sees a megapixel whatever the picture, hence few and short runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

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


def edited(name: str, output_type: str = "latent", **changed: Any) -> Outcome:
    requests = {
        case: request_of({**call_of(name, case), **changed}, SEEDS[case], output_type, case)
        for case in CASES
    }
    return editing(name).run(requests, JOINS_AT)


@cache
def theirs(name: str, case: str, output_type: str) -> Any:
    images = reference_images(pipeline_of(name), call_of(name, case), SEEDS[case], output_type)
    return as_tensor(images).float()


def distances(outcome: Outcome, name: str, output_type: str = "latent") -> dict[str, float]:
    return {
        case: distance(outcome.results[case].tensors["images"], theirs(name, case, output_type))
        for case in CASES
    }


@pytest.mark.parametrize("name", EDITORS)
def test_edits_in_a_batch_equal_diffusers(name):
    outcome = edited(name)
    assert {"first", "second", "third"} in [set(wave) for wave in outcome.waves("step")]
    found = distances(outcome, name)
    assert max(found.values()) <= LIMIT, found
    references = [theirs(name, case, "latent") for case in CASES]
    assert all(one.std() >= LOUD_STD for one in references)
    assert distance(references[0], references[2]) > CLEARLY_WRONG


@pytest.mark.parametrize("name", EDITORS)
def test_edited_pictures_equal_diffusers(name):
    """The tiny autoencoder of five levels multiplies the difference of latents by about ten."""
    found = distances(edited(name, "np"), name, "np")
    assert max(found.values()) <= 10 * LIMIT, found


@pytest.mark.parametrize("name", EDITORS)
def test_it_sees_pictures_of_another_request(name, monkeypatch):
    family = editing(name).family
    correct = family.start

    def swapped(state, channels, pixels):
        return correct(state, channels, pixels.flip(-1, -2))

    monkeypatch.setattr(family, "start", swapped)
    found = distances(edited(name), name)
    assert min(found.values()) > CLEARLY_WRONG, found


@pytest.mark.parametrize("name", EDITORS)
def test_it_sees_prompts_that_saw_other_pictures(name, monkeypatch):
    family = editing(name).family
    correct = family.seen
    monkeypatch.setattr(family, "seen", lambda state: [one.rotate(180) for one in correct(state)])
    if name == "qwen_image_edit":
        monkeypatch.setattr(family, "joined", correct)
    found = distances(edited(name), name)
    assert min(found.values()) > LIMIT, found


def test_several_pictures_in_one_sequence_equal_diffusers():
    name = "qwen_image_edit_plus"
    call = call_of(name, "first") | {"num_inference_steps": 2}
    pictures = [call.pop("image"), gradient_image(32, 40)]
    request = request_of(call, 7, "latent")
    request.data.tensors.update({f"image_{i}": np.asarray(one) for i, one in enumerate(pictures)})
    outcome = editing(name).run({"req": request})
    assert not outcome.errors
    reference = reference_images(pipeline_of(name), {**call, "image": pictures}, 7, "latent")
    alone = reference_images(pipeline_of(name), {**call, "image": pictures[1]}, 7, "latent")
    assert distance(outcome.results["req"].tensors["images"], reference) <= LIMIT
    assert distance(alone, reference) > CLEARLY_WRONG
