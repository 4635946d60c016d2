"""Weights that make a tiny random model behave: seeded, signal-preserving, nowhere trivial."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def seeded_pipeline(assemble: Callable[[], DiffusionPipeline]) -> DiffusionPipeline:
    """Assemble a pipeline, in evaluation mode, whose every weight follows from its name alone.

    The caller's random state is left as it was. Components are seeded by their names, so two
    encoders of one pipeline differ although their shapes are equal.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = assemble()
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            randomize(component.eval(), seed=crc32(name.encode()))
    return pipeline


@torch.no_grad()
def randomize(module: nn.Module, seed: int) -> None:
    """Overwrite all parameters, so that no output layer, gate or modulation stays at zero.

    Convolutions, whose inputs are normalized, keep the variance of what they see: their std is
    `fan_in ** -0.5`. Matrices have half as much variance again, since many stand behind a SiLU or
    GELU, which takes some; more (2, after He) makes a few families chaotic, less lets the prompt
    fade. An embedding, looked up and not multiplied, has std 1. The scales of norms lie about 1,
    biases about 0.

    The libraries' own initialisation would give near-zero residual branches (adaLN-Zero) and
    pictures of almost one colour, in which errors hide.
    Tied parameters are visited once and remain tied.
    """
    generator = torch.Generator().manual_seed(seed)
    looked_up = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if _is_vector(parameter):
            mean = 1.0 if name.endswith(("weight", "gamma")) else 0.0
            parameter.copy_(mean + 0.1 * noise)
        elif id(parameter) in looked_up:
            parameter.copy_(noise)
        else:
            gain = 1.5 if parameter.ndim == 2 else 1.0
            parameter.copy_(noise * (gain / parameter[0].numel()) ** 0.5)


def _is_vector(parameter: torch.Tensor) -> bool:
    """True for (C,), for a norm's (C, 1, 1) and for a scalar."""
    return parameter.ndim < 2 or parameter.numel() == parameter.shape[0]
