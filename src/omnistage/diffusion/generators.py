"""The random numbers of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import OmniDiffusionSamplingParams

if TYPE_CHECKING:
    import torch


def make_generator(params: OmniDiffusionSamplingParams, device: str) -> torch.Generator:
    """On the CPU unless the caller wants the stage's device: equal seeds give equal noise
    everywhere. Raises `InvalidRequestError` for another device."""
    import torch

    wanted = params.generator_device or "cpu"
    own = device.partition(":")[0]
    if wanted not in ("cpu", own, device):
        raise InvalidRequestError(
            f"generator_device {wanted!r} is not there; allowed: cpu, {own}",
            param="generator_device",
        )
    place = device if wanted == own else wanted
    assert params.seed is not None, "the scheduler draws a seed where the caller gives none"
    return torch.Generator(place).manual_seed(params.seed)
