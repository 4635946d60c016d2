from __future__ import annotations

import pytest

from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.diffusion.options import DiffusionOptions, read_options
from omnistage.diffusion.runtime import DiffusionRuntime
from tests.diffusion.driver import diffusion_stage


def test_defaults_and_values():
    assert read_options({}) == DiffusionOptions()
    assert read_options({}).max_pixels == ApiSettings().max_pixels
    assert read_options({"vae_tiling": True, "max_pixels": 9}).max_pixels == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vae_tilling": True}, "did you mean 'vae_tiling'"),
        ({"zzz": 1}, "allowed: max_queued_requests"),
        ({"max_pixels": 0}, "max_pixels must be a positive integer, got 0"),
        ({"max_pixels": True}, "max_pixels must be a positive integer, got True"),
        ({"vae_slicing": "yes"}, "vae_slicing must be true or false, got 'yes'"),
        ({"image_input": "never"}, "image_input must be 'optional' or 'required', got 'never'"),
        (
            {"warmup_sizes": ["1024"]},
            "warmup_sizes must be a list like ['1024x1024']",
        ),
    ],
)
def test_what_is_wrong_is_named(options, words):
    with pytest.raises(ConfigurationError, match="option") as caught:
        DiffusionRuntime.scheduler(diffusion_stage("/nowhere", options=options))
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["max_batch_shapes", "max_overtakes", "guidance_in_one_batch"])
def test_what_only_step_mode_uses_is_refused_in_request_mode(name):
    options = {name: True if name == "guidance_in_one_batch" else 2}
    with pytest.raises(UnsupportedCombinationError, match=f"option {name} has no effect"):
        DiffusionRuntime.scheduler(diffusion_stage("/nowhere", options=options))
