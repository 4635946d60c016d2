"""Scheduler and autoencoder settings of one request, and of the deployment."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import (
    ConfigurationError,
    InvalidRequestError,
    RequestCancelledError,
    UnsupportedCombinationError,
)
from tests.checkpoints import FAMILIES, checkpoint
from tests.diffusion.driver import Driver, RecordingContext
from tests.diffusion.reference import (
    reference_images,
    reference_pipeline,
    request_of,
    same_bits,
)

SEED = 7


@pytest.mark.invariant("DIFF-RUNTIME-INV-015")
@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("sd15", "EulerDiscreteScheduler"),
        ("sd15", "DDIMScheduler"),
        ("sdxl", "HeunDiscreteScheduler"),
        ("pixart_sigma", "UniPCMultistepScheduler"),
    ],
)
def test_scheduler_choice_equals_diffusers_and_ends_with_the_request(name, scheduler, driver):
    import diffusers

    call = FAMILIES[name].call
    theirs_pipeline = reference_pipeline(checkpoint(name))
    plain = reference_images(theirs_pipeline, call, SEED, "np")
    chosen = getattr(diffusers, scheduler)
    theirs_pipeline.scheduler = chosen.from_config(theirs_pipeline.scheduler.config)
    theirs = reference_images(theirs_pipeline, call, SEED, "np")
    assert not same_bits(theirs, plain)

    before, config = driver(name).pipeline.scheduler, dict(driver(name).pipeline.config)
    context = RecordingContext()
    request = request_of({**call, "scheduler": scheduler}, SEED, "np")
    assert same_bits(driver(name).run(request, context).tensors["images"], theirs)
    assert driver(name).pipeline.scheduler is before
    assert dict(driver(name).pipeline.config) == config
    assert context.steps[-1][0] == context.steps[-1][1] == len(theirs_pipeline.scheduler.timesteps)
    assert [step for step, _ in context.steps] == sorted(step for step, _ in context.steps)
    again = driver(name).run(request_of(call, SEED, "np")).tensors["images"]
    assert same_bits(again, plain)


def test_settings_are_undone_after_a_cancellation(driver):
    pipeline = driver("sd15").pipeline
    before = pipeline.scheduler
    changes = {"scheduler": "DDIMScheduler", "vae_tiling": True}
    with pytest.raises(RequestCancelledError):
        driver("sd15").run(
            request_of({**FAMILIES["sd15"].call, **changes}, SEED, None),
            RecordingContext(cancel_at=3),
        )
    assert pipeline.scheduler is before
    assert pipeline.vae.use_tiling is False


def test_an_unfit_scheduler_is_refused_with_what_fits(driver):
    call = {**FAMILIES["sd15"].call, "scheduler": "EulerScheduler"}
    with pytest.raises(InvalidRequestError, match="EulerDiscreteScheduler") as caught:
        driver("sd15").run(request_of(call, SEED, None))
    assert caught.value.param == "scheduler"


def test_flow_shift_rebuilds_the_scheduler(driver):
    from diffusers import FlowMatchEulerDiscreteScheduler

    call = FAMILIES["sd3"].call
    theirs_pipeline = reference_pipeline(checkpoint("sd3"))
    theirs_pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        theirs_pipeline.scheduler.config, shift=7.0
    )
    theirs = reference_images(theirs_pipeline, call, SEED, "np")
    request = request_of({**call, "flow_shift": 7.0}, SEED, "np")
    assert same_bits(driver("sd3").run(request).tensors["images"], theirs)


def test_flow_shift_that_would_be_ignored_is_refused(driver):
    call = {**FAMILIES["qwen_image"].call, "flow_shift": 7.0}
    with pytest.raises(UnsupportedCombinationError, match="flow_shift has no effect"):
        driver("qwen_image").run(request_of(call, SEED, None))


@pytest.mark.parametrize("name", ["qwen_image", "sd15", "flux"])
@pytest.mark.parametrize("feature", ["tiling", "slicing"])
def test_autoencoder_features_equal_diffusers_and_end_with_the_request(name, feature, driver):
    call = {**FAMILIES[name].call, "height": 96, "width": 64, "num_images_per_prompt": 2}
    theirs_pipeline = reference_pipeline(checkpoint(name))
    for pipeline in (theirs_pipeline, driver(name).pipeline):
        if hasattr(pipeline.vae, "tile_latent_min_size"):
            pipeline.vae.tile_sample_min_size = 32
            pipeline.vae.tile_latent_min_size = 8
        else:
            pipeline.vae.tile_sample_min_height = pipeline.vae.tile_sample_min_width = 32
            pipeline.vae.tile_sample_stride_height = pipeline.vae.tile_sample_stride_width = 24
    plain = reference_images(theirs_pipeline, call, SEED, "np")
    getattr(theirs_pipeline.vae, f"enable_{feature}")()
    theirs = reference_images(theirs_pipeline, call, SEED, "np")
    if feature == "tiling":
        assert not same_bits(theirs, plain)
    request = request_of({**call, f"vae_{feature}": True}, SEED, "np")
    assert same_bits(driver(name).run(request).tensors["images"], theirs)
    assert getattr(driver(name).pipeline.vae, f"use_{feature}") is False
    assert same_bits(driver(name).run(request_of(call, SEED, "np")).tensors["images"], plain)


def test_the_deployment_can_turn_tiling_on_and_a_request_off_again():
    ours = Driver(checkpoint("sd15"), options={"vae_tiling": True})
    assert ours.pipeline.vae.use_tiling is True
    ours.run(request_of({**FAMILIES["sd15"].call, "vae_tiling": False}, SEED, None))
    assert ours.pipeline.vae.use_tiling is True


def test_a_deployment_cannot_ask_for_what_the_autoencoder_lacks():
    with pytest.raises(ConfigurationError, match="no autoencoder that can do tiling"):
        Driver(checkpoint("kandinsky3"), options={"vae_tiling": True})
