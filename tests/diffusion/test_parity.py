"""Our executor against the unmodified pipeline of the same checkpoint, same seed: bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import FAMILIES
from tests.diffusion.reference import (
    as_tensor,
    reference_images,
    request_of,
    same_bits,
)

LOUD_STD = 0.05
SEED = 7
TEXT_FAMILIES = [name for name, one in FAMILIES.items() if one.task == "text-to-image"]


@pytest.mark.invariant("DIFF-RUNTIME-INV-010")
@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
@pytest.mark.parametrize("name", FAMILIES)
def test_output_equals_diffusers(name, output_type, driver, reference):
    call = FAMILIES[name].call
    theirs = reference_images(reference(name), call, SEED, output_type)
    result = driver(name).run(request_of(call, SEED, output_type))
    images = result.tensors["images"]
    assert same_bits(images, theirs)
    loud = as_tensor(theirs).float().std()
    assert loud >= LOUD_STD * (255 if output_type == "pil" else 1)
    if output_type != "latent":
        first = 2 if output_type == "pt" else 1
        size = (result.fields["height"], result.fields["width"])
        assert size == tuple(images.shape[first : first + 2])


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_the_comparison_sees_another_seed(name, driver, reference):
    call = FAMILIES[name].call
    theirs = reference_images(reference(name), call, SEED + 1, "pil")
    ours = driver(name).run(request_of(call, SEED, "pil")).tensors["images"]
    assert ours.shape == theirs.shape
    assert not same_bits(ours, theirs)


@pytest.mark.parametrize("name", ["qwen_image", "flux", "sd15"])
def test_the_comparison_sees_one_changed_weight(name, driver, reference):
    call = FAMILIES[name].call
    theirs = reference_images(reference(name), call, SEED, "np")
    denoiser = getattr(driver(name).pipeline, "unet", None) or driver(name).pipeline.transformer
    weight = next(p for p in denoiser.parameters() if p.ndim >= 2)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[0] += 1.0
    try:
        changed = driver(name).run(request_of(call, SEED, "np")).tensors["images"]
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert not same_bits(changed, theirs)
    assert same_bits(driver(name).run(request_of(call, SEED, "np")).tensors["images"], theirs)


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_two_outputs_of_one_prompt_equal_diffusers(name, driver, reference):
    call = {**FAMILIES[name].call, "num_images_per_prompt": 2}
    theirs = reference_images(reference(name), call, SEED, "pil")
    ours = driver(name).run(request_of(call, SEED, None)).tensors["images"]
    assert len(ours) == 2
    assert same_bits(ours, theirs)
    assert not same_bits(ours[0], ours[1])


@pytest.mark.parametrize(
    "name", [name for name in TEXT_FAMILIES if "negative_prompt" in FAMILIES[name].call]
)
def test_negative_prompt_reaches_the_pipeline(name, driver, reference):
    call = {**FAMILIES[name].call, "negative_prompt": "a bad house"}
    theirs = reference_images(reference(name), call, SEED, "np")
    ours = driver(name).run(request_of(call, SEED, "np")).tensors["images"]
    assert same_bits(ours, theirs)
    plain = driver(name).run(request_of(FAMILIES[name].call, SEED, "np")).tensors["images"]
    assert not same_bits(ours, plain)


@pytest.mark.parametrize("name", ["qwen_image", "sd15", "flux"])
def test_latents_of_the_caller_equal_diffusers(name, driver, reference):
    call = FAMILIES[name].call
    start = reference_images(reference(name), call, SEED, "latent")
    call = {**call, "latents": torch.randn(start.shape, generator=torch.manual_seed(3))}
    theirs = reference_images(reference(name), call, SEED, "np")
    as_torch = driver(name).run(request_of(call, SEED, "np")).tensors["images"]
    as_numpy = {**call, "latents": call["latents"].numpy()}
    assert same_bits(as_torch, theirs)
    assert same_bits(driver(name).run(request_of(as_numpy, 99, "np")).tensors["images"], theirs)


def test_sigmas_of_the_caller_equal_diffusers(driver, reference):
    call = {**FAMILIES["qwen_image"].call, "sigmas": [1.0, 0.9, 0.3]}
    del call["num_inference_steps"]
    theirs = reference_images(reference("qwen_image"), call, SEED, "np")
    assert same_bits(
        driver("qwen_image").run(request_of(call, SEED, "np")).tensors["images"], theirs
    )


@pytest.mark.invariant("DIFF-RUNTIME-INV-011")
def test_a_seed_is_drawn_reported_and_repeats_the_picture(driver):
    call = FAMILIES["qwen_image"].call
    first = driver("qwen_image").run(request_of(call, None, "np"))
    second = driver("qwen_image").run(request_of(call, None, "np"))
    assert first.fields["seed"] != second.fields["seed"]
    assert not same_bits(first.tensors["images"], second.tensors["images"])
    again = driver("qwen_image").run(request_of(call, first.fields["seed"], "np"))
    assert same_bits(again.tensors["images"], first.tensors["images"])
