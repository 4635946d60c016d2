"""The layout of the decoder's weights in step mode on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnistage.diffusion.decoder_layout import channels_last
from tests.checkpoints import checkpoint
from tests.diffusion.reference import reference_pipeline


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return reference_pipeline(checkpoint("qwen_image"))


@torch.no_grad()
def decoded(pipeline: Any) -> torch.Tensor:
    vae = pipeline.vae
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(3, vae.config.z_dim, 1, 4, 4, generator=generator)
    return vae.decode(latents, return_dict=False)[0]


def test_pictures_stay_and_so_do_parameters(pipeline: Any) -> None:
    before, parameters = decoded(pipeline), list(pipeline.vae.parameters())
    undo = channels_last(pipeline)
    convolutions = [one for one in pipeline.vae.decoder.parameters() if one.ndim == 5]
    assert any(not one.is_contiguous() for one in convolutions)
    assert before.abs().max() > 0.05
    torch.testing.assert_close(decoded(pipeline), before, rtol=0, atol=1e-5)
    undo()
    assert all(one.is_contiguous() for one in convolutions)
    assert all(one is two for one, two in zip(pipeline.vae.parameters(), parameters, strict=True))
    assert torch.equal(decoded(pipeline), before)


def test_a_pipeline_without_an_autoencoder_has_nothing_to_lay_out() -> None:
    channels_last(SimpleNamespace(components={}))()  # type: ignore[arg-type]
