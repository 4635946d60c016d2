"""What a caller may ask of a pipeline, and what they are told when it cannot do it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from omnistage.contracts.errors import (
    ConfigurationError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from tests.checkpoints import FAMILIES, checkpoint
from tests.diffusion.driver import Driver, diffusion_request
from tests.diffusion.reference import reference_images, request_of, same_bits

SEED = 7
SMALL = {"height": 32, "width": 48, "num_inference_steps": 2, "seed": SEED}


def refusal(driver, **request) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        driver.run(diffusion_request(**{**SMALL, **request}))
    return caught.value


@pytest.mark.invariant("DIFF-RUNTIME-INV-014")
@pytest.mark.parametrize(
    ("name", "request_fields", "param", "words"),
    [
        ("sd3", {"true_cfg_scale": 3.0}, "true_cfg_scale", "StableDiffusion3Pipeline"),
        ("qwen_image", {"num_frames": 8}, "num_frames", "QwenImagePipeline"),
        ("qwen_image", {"extra_args": {"max_sequence_len": 9}}, "max_sequence_len", "max_sequence"),
        ("qwen_image", {"extra_args": {"generator": 1}}, "extra_args", "generator"),
        ("flux2_klein", {"negative_prompt": "bad"}, "negative_prompt", "Flux2KleinPipeline"),
        ("qwen_image", {"prompt": None}, "prompt", "missing"),
        ("qwen_image", {"num_inference_steps": 0}, "num_inference_steps", "at least 1"),
        ("qwen_image", {"height": -32}, "height", "at least 1"),
        ("qwen_image", {"height": 3}, "height", "at least 8 for this model"),
        ("qwen_image", {"max_sequence_length": 0}, "max_sequence_length", "at least 1"),
        ("qwen_image", {"sigmas": []}, "sigmas", "at least one number"),
        ("qwen_image", {"height": 8192, "width": 8192}, "height", "33177600"),
        ("qwen_image", {"output_type": "gif"}, "output_type", "pil, np, pt, latent"),
        ("qwen_image", {"seed": 2**64}, "seed", "64 bits"),
        ("sd3", {"guidance_scale": math.nan}, "guidance_scale", "finite"),
        ("qwen_image", {"generator_device": "tpu"}, "generator_device", "allowed: cpu"),
        ("sd15", {"extra_args": {"clip_skip": "two"}}, "extra_args", "wrong type"),
        ("qwen_image", {"latents": np.zeros((1, 5, 7), np.float32)}, "latents", "(1, 5, 7)"),
        ("qwen_image", {"latents": np.full((1, 6, 16), np.nan)}, "latents", "finite"),
        ("qwen_image", {"height": 32, "extra_args": {"height": 64}}, "height", "twice"),
    ],
)
def test_a_parameter_the_pipeline_cannot_use_is_named(name, request_fields, param, words, driver):
    error = refusal(driver(name), **request_fields)
    assert error.param == param
    assert words in error.message


def test_nearest_names_are_offered(driver):
    error = refusal(driver("sd3"), true_cfg_scale=3.0)
    assert "guidance_scale" in error.message


def test_the_pipelines_own_check_is_a_refusal(driver):
    error = refusal(driver("sd3"), height=33)
    assert "divisible by" in error.message
    assert error.status == 400


def test_true_guidance_without_a_negative_prompt_is_refused(driver):
    with pytest.raises(UnsupportedCombinationError, match="negative_prompt"):
        driver("qwen_image").run(diffusion_request(**SMALL, true_cfg_scale=3.0))


def test_a_negative_prompt_that_flux_would_ignore_is_refused(driver):
    with pytest.raises(UnsupportedCombinationError, match="true_cfg_scale"):
        driver("flux").run(diffusion_request(**SMALL, negative_prompt="bad"))


def test_embedded_guidance_is_refused_by_a_model_without_it(driver):
    with pytest.raises(UnsupportedCombinationError, match="guidance embedding"):
        driver("qwen_image").run(diffusion_request(**SMALL, guidance_scale=3.5))


def test_true_guidance_of_flux_equals_diffusers(driver, reference):
    call = {**FAMILIES["flux"].call, "true_cfg_scale": 3.0, "negative_prompt": ""}
    theirs = reference_images(reference("flux"), call, SEED, "np")
    ours = driver("flux").run(request_of(call, SEED, "np")).tensors["images"]
    assert same_bits(ours, theirs)
    assert not same_bits(
        ours, driver("flux").run(request_of(FAMILIES["flux"].call, SEED, "np")).tensors["images"]
    )


def test_a_refused_request_leaves_the_pipeline_as_it_was(driver, reference):
    call = FAMILIES["sd3"].call
    refusal(driver("sd3"), height=33)
    theirs = reference_images(reference("sd3"), call, SEED, "pil")
    assert same_bits(driver("sd3").run(request_of(call, SEED, None)).tensors["images"], theirs)


class TestDeploymentDefaults:
    DEFAULTS = {  # noqa: RUF012
        "height": 32,
        "width": 48,
        "num_inference_steps": 2,
        "true_cfg_scale": 4.0,
        "extra_args": {"negative_prompt": " "},
    }

    @pytest.fixture(scope="class")
    def deployed(self):
        return Driver(checkpoint("qwen_image"), default_sampling_params=self.DEFAULTS)

    def test_they_fill_what_the_request_leaves_open(self, deployed, reference):
        call = {"prompt": "a red cat", **self.DEFAULTS, **self.DEFAULTS["extra_args"]}
        del call["extra_args"]
        theirs = reference_images(reference("qwen_image"), call, SEED, "pil")
        ours = deployed.run(diffusion_request(seed=SEED)).tensors["images"]
        assert same_bits(ours, theirs)

    def test_the_request_wins(self, deployed, reference):
        call = {
            "prompt": "a red cat",
            "negative_prompt": "bad",
            "true_cfg_scale": 2.0,
            "height": 48,
            "width": 32,
            "num_inference_steps": 3,
        }
        theirs = reference_images(reference("qwen_image"), call, SEED, "pil")
        ours = deployed.run(request_of(call, SEED, None)).tensors["images"]
        assert same_bits(ours, theirs)

    def test_a_default_that_the_pipeline_does_not_take_fails_at_load(self):
        with pytest.raises(ConfigurationError, match="true_cfg_scale"):
            Driver(checkpoint("sd3"), default_sampling_params={"true_cfg_scale": 4.0})

    def test_a_default_that_a_sibling_does_not_take_is_left_out(self):
        ours = Driver(
            checkpoint("sd15"),
            default_sampling_params={"height": 32, "width": 48, "num_inference_steps": 4},
        )
        image = np.zeros((32, 32, 3), np.uint8)
        result = ours.run(diffusion_request(images=(image,), seed=SEED))
        assert result.tensors["images"].shape == (1, 32, 32, 3)


@pytest.fixture(scope="module")
def four_steps():
    defaults = {"height": 32, "width": 48, "num_inference_steps": 4}
    return Driver(checkpoint("sd3"), default_sampling_params=defaults)


@pytest.mark.parametrize(("quality", "steps"), [("low", 2), ("medium", 4), ("hd", 8)])
def test_quality_scales_the_default_number_of_steps(quality, steps, four_steps):
    result = four_steps.run(diffusion_request(seed=SEED, quality=quality))
    assert result.fields["num_inference_steps"] == steps


def test_an_unknown_quality_is_refused(four_steps):
    with pytest.raises(InvalidRequestError) as caught:
        four_steps.run(diffusion_request(seed=SEED, quality="best"))
    assert caught.value.param == "quality"
