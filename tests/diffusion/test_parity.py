"""Our executor against the unmodified pipeline of the same checkpoint, same seed: bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import FAMILIES, checkpoint
from tests.diffusion.driver import Driver
from tests.diffusion.reference import (
    as_tensor,
    reference_images,
    reference_pipeline,
    request_of,
    same_bits,
)

LOUD_STD = 0.05
SEED = 7


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """(family, our driver, diffusers' pipeline), one family at a time."""
    folder = checkpoint(request.param)
    return FAMILIES[request.param], Driver(folder), reference_pipeline(folder)


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
def test_output_equals_diffusers(pair, output_type):
    family, driver, pipeline = pair
    theirs = reference_images(pipeline, family.call, SEED, output_type)
    result = driver.run(request_of(family.call, SEED, output_type))
    images = result.tensors["images"]
    assert same_bits(images, theirs)
    loud = as_tensor(theirs).float().std()
    assert loud >= LOUD_STD * (255 if output_type == "pil" else 1)
    assert result.fields["seed"] == SEED
    if output_type != "latent":
        pixels = images.shape[1:3] if output_type != "pt" else images.shape[2:4]
        assert (result.fields["height"], result.fields["width"]) == tuple(pixels)
