"""Several requests in one call of the pipeline against one call of diffusers for each."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from omnistage.contracts.runtime import StageRequest
from tests.checkpoints import FAMILIES
from tests.diffusion.concurrent import Concurrent, Outcome
from tests.diffusion.parity_cases import (
    LIMIT,
    LONG_PROMPT,
    LOUD_STD,
    STEP_FAMILIES,
    distance,
    limit_of,
    pipeline_of,
)
from tests.diffusion.reference import as_tensor, reference_images, request_of

CLEARLY_WRONG = 100 * LIMIT
PROMPTS = ["a red cat", LONG_PROMPT, "dog", "an image of the user at a tree"]
SHARED: dict[str, dict[str, Any]] = {
    "qwen_image": {"true_cfg_scale": 2.0},
    "flux": {"negative_prompt": "bad", "true_cfg_scale": 1.5, "guidance_scale": 2.0},
    "flux_schnell": {},
    "sd35": {"guidance_scale": 1.5},
}


@cache
def batching(name: str) -> Concurrent:
    return Concurrent(name, max_num_seqs=4)


def call_of(name: str, index: int, **changes: Any) -> dict[str, Any]:
    return {**FAMILIES[name].call, **SHARED[name], "prompt": PROMPTS[index], **changes}


def request(name: str, index: int, output_type: str, **changes: Any) -> StageRequest:
    return request_of(call_of(name, index, **changes), 20 + index, output_type, str(index))


def run(name: str, output_type: str = "latent", **changes: Any) -> Outcome:
    requests = {str(i): request(name, i, output_type, **changes) for i in range(len(PROMPTS))}
    return batching(name).run(requests)


def theirs(name: str, index: int, output_type: str = "latent", **changes: Any) -> Any:
    call = call_of(name, index, **changes)
    images = reference_images(pipeline_of(name), call, 20 + index, output_type)
    return as_tensor(images).float()


@pytest.mark.invariant("MODEL-INV-022")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("output_type", ["latent", "np", "pil"])
@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_each_of_a_fused_call_equals_diffusers(name, output_type, count):
    outcome = run(name, output_type, num_images_per_prompt=count)
    assert outcome.commands == [("generate", ("0", "1", "2", "3"))]
    references = []
    for index in range(len(PROMPTS)):
        reference = theirs(name, index, output_type, num_images_per_prompt=count)
        ours = outcome.results[str(index)].tensors["images"]
        assert len(ours) == count
        assert distance(ours, reference) <= limit_of(output_type)
        references.append(reference)
        assert reference.std() >= LOUD_STD
    for index, reference in enumerate(references[1:]):
        assert distance(references[index], reference) > CLEARLY_WRONG


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_it_sees_another_seed_and_another_prompt(name):
    outcome = run(name)
    for index in range(len(PROMPTS)):
        ours = outcome.results[str(index)].tensors["images"]
        swapped = theirs(name, index, prompt=PROMPTS[(index + 1) % len(PROMPTS)])
        other_seed = reference_images(pipeline_of(name), call_of(name, index), 99, "latent")
        assert distance(ours, swapped) > CLEARLY_WRONG
        assert distance(ours, other_seed) > CLEARLY_WRONG


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_it_sees_outputs_that_draw_from_generators_of_their_own(name, monkeypatch):
    runner = batching(name).executor._requests
    correct = type(runner)._generators

    def separate(self, inputs):
        return [one for given in inputs for one in (correct(self, [given]), correct(self, [given]))]

    monkeypatch.setattr(type(runner), "_generators", separate)
    outcome = run(name, num_images_per_prompt=2)
    reference = theirs(name, 0, num_images_per_prompt=2)
    ours = outcome.results["0"].tensors["images"]
    assert distance(ours[:1], reference[:1]) <= LIMIT
    assert distance(ours[1:], reference[1:]) > CLEARLY_WRONG


@pytest.mark.parametrize("name", STEP_FAMILIES)
def test_requests_that_differ_in_more_than_texts_and_seed_share_no_call(name):
    changes: list[dict[str, Any]] = [
        {},
        {"num_inference_steps": 3},
        {"num_images_per_prompt": 2},
        {"height": 48},
        {"max_sequence_length": 40},
    ]
    requests = {
        str(i): request_of(call_of(name, 0, **one), 7, "latent", str(i))
        for i, one in enumerate(changes)
    }
    outcome = batching(name).run(requests)
    assert sorted(outcome.waves("generate")) == [(str(i),) for i in range(len(changes))]
    for index, one in enumerate(changes):
        reference = reference_images(pipeline_of(name), call_of(name, 0, **one), 7, "latent")
        assert distance(outcome.results[str(index)].tensors["images"], reference) == 0


@pytest.mark.parametrize("name", ["flux", "sd35"])
def test_second_prompts_in_a_fused_call_equal_diffusers(name):
    """A text that the call repeats for no one must not reach one request only."""
    outcome = run(name, prompt_2="a tree at the house")
    assert outcome.commands == [("generate", ("0", "1", "2", "3"))]
    for index in range(len(PROMPTS)):
        reference = theirs(name, index, prompt_2="a tree at the house")
        assert distance(outcome.results[str(index)].tensors["images"], reference) <= LIMIT


def test_a_negative_prompt_without_effect_does_not_part_a_call():
    """One is the stage's default, which is left out where there is no guidance; one is not."""
    defaults = {"extra_args": {"negative_prompt": " "}}
    runtime = Concurrent("qwen_image", max_num_seqs=4, default_sampling_params=defaults)
    call = {**call_of("qwen_image", 0), "true_cfg_scale": 1.0}
    requests = {
        str(i): request_of({**call, "negative_prompt": text}, 20, "latent", str(i))
        for i, text in enumerate(["", " ", ""])
    }
    outcome = runtime.run(requests)
    assert outcome.commands == [("generate", ("0", "1", "2"))]
    del call["negative_prompt"]
    reference = reference_images(pipeline_of("qwen_image"), call, 20, "latent")
    for data in outcome.results.values():
        assert distance(data.tensors["images"], reference) <= LIMIT
