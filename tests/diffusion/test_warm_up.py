"""A stage is warmed up by requests of nobody's, which leave nothing behind."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import ConfigurationError
from omnistage.diffusion.warm_up import warm_up
from omnistage.models.qwen_image.pipeline import step_options
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(
        checkpoint("qwen_image"), step_execution=True, options=step_options("QwenImagePipeline")
    )


def test_one_alone_and_two_together_take_steps_and_are_gone(driver, monkeypatch):
    waves = []
    family = driver.executor._fast_path.family
    step = family.denoise_step
    monkeypatch.setattr(
        family, "denoise_step", lambda states: (waves.append(len(states)), step(states))[1]
    )
    warm_up(driver.executor._steps, 64, 32, with_picture=False)
    assert waves == [1, 1, 2, 2]
    assert driver.executor._steps.num_states == 0


def test_a_size_that_the_model_refuses_is_named(driver, monkeypatch):
    def refuse(state):
        raise ValueError("too odd")

    monkeypatch.setattr(driver.executor._fast_path.family, "check", refuse)
    with pytest.raises(ConfigurationError, match=r"warm-up at 32x64: .*too odd"):
        warm_up(driver.executor._steps, 64, 32, with_picture=False)
    assert driver.executor._steps.num_states == 0
