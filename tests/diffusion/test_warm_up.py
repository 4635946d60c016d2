"""A stage is warmed up by requests of nobody's, which leave nothing behind."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import ConfigurationError
from omnistage.diffusion.warm_up import warm_up_call, warm_up_steps
from omnistage.models.qwen_image.pipeline import step_options
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(
        checkpoint("qwen_image"), step_execution=True, options=step_options("QwenImagePipeline")
    )


def test_requests_take_two_steps_together_and_are_gone(driver, monkeypatch):
    waves = []
    family = driver.executor._fast_path.family
    step = family.denoise_step
    monkeypatch.setattr(
        family, "denoise_step", lambda states: (waves.append(len(states)), step(states))[1]
    )
    for count in (1, 2):
        warm_up_steps(driver.executor._steps, 64, 32, with_picture=False, count=count)
    assert waves == [1, 1, 2, 2]
    assert driver.executor._steps.num_states == 0


def test_request_mode_makes_a_whole_call(monkeypatch):
    ours = Driver(checkpoint("qwen_image"), options=step_options("QwenImagePipeline"))
    calls = []
    handle = ours.pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["hidden_states"].shape[0]),
        with_kwargs=True,
    )
    for count in (1, 2):
        warm_up_call(ours.executor._requests, 32, 32, with_picture=False, count=count)
    handle.remove()
    assert calls == [1, 1, 1, 2, 2, 2]


def test_a_size_that_the_model_refuses_is_named(driver, monkeypatch):
    def refuse(state):
        raise ValueError("too odd")

    monkeypatch.setattr(driver.executor._fast_path.family, "check", refuse)
    with pytest.raises(ConfigurationError, match=r"warm-up at 32x64: .*too odd"):
        warm_up_steps(driver.executor._steps, 64, 32, with_picture=False, count=1)
    assert driver.executor._steps.num_states == 0
