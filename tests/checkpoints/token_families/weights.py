"""Weights that make a tiny random language model behave: what it says depends on all it was told,
and no two next tokens are nearly as likely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .family import Assembler

EMBEDDING_STD = 0.05
HEAD_STD = 0.5
GAIN = 4.0
CALM_GAIN = 1.5
CODEC_GAIN = 0.4
CALM_PARTS = "audio_tower", "visual", "code2wav", "token2wav"
LOUDNESS_RMS = 0.2


def seeded_model(assemble: Assembler) -> tuple[PreTrainedModel, Any]:
    """The assembler's model, in evaluation mode, whose every weight follows from its name and
    shape. The caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, words = assemble()
    randomize(model.eval())
    return model, words


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Overwrite all parameters; a tied one is visited once and remains tied.

    Matrices enlarge the variance of what they see (by fan-in, the last dimension but for
    convolutions; experts are stacks of matrices), so that attention is choosy; encoders and
    vocoders do so less, lest they turn roundings into other results: the convolutions of a codec
    decoder, residual and with a sine of their sums in between, make it smaller. Vectors are what
    their class made them plus noise. Embeddings are small beside what layers add, lest a model
    repeats its last token for ever, and heads large enough that logits spread by several units: the
    classes' own initialization (0.02) gives almost flat ones.
    """
    modules = list(model.modules())
    looked_up = {id(part.weight) for part in modules if isinstance(part, nn.Embedding)}
    fan_ins = {id(part.weight): _fan_in(part) for part in modules if isinstance(part, _ConvNd)}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        path = set(name.split("."))
        if parameter.ndim < 2:
            parameter.add_(0.1 * noise)
        elif id(parameter) in looked_up:
            calm = path.intersection(CALM_PARTS)
            parameter.copy_((1.0 if calm else EMBEDDING_STD) * noise)
        elif any(part.endswith("_head") for part in path):
            parameter.copy_(HEAD_STD * noise)
        else:
            fan_in = fan_ins.get(id(parameter), parameter.shape[-1])
            gain = CALM_GAIN if path.intersection(CALM_PARTS) else GAIN
            if "code2wav" in path and id(parameter) in fan_ins:
                gain = CODEC_GAIN
            parameter.copy_(noise * (gain / fan_in) ** 0.5)


def _fan_in(convolution: nn.Module) -> float:
    """How many values a value of the result is a sum of."""
    weight = convolution.weight
    if getattr(convolution, "transposed", False):
        return weight[:, 0].numel() / torch.tensor(convolution.stride).prod().item()
    return weight[0].numel()


@torch.no_grad()
def loud_for_a_tied_head(norm: nn.Module) -> None:
    """Make the last norm's scale as much larger as the head is smaller for being the embeddings."""
    norm.weight.add_(HEAD_STD / EMBEDDING_STD - 1)


@torch.no_grad()
def enlarge(norm: nn.Module) -> None:
    """About three times what it gives, where its weight counts from zero."""
    norm.weight.add_(2)


@torch.no_grad()
def make_loud(last: nn.Module, waveform: torch.Tensor) -> None:
    """Scale the last convolution so that a waveform like this one has the wanted loudness."""
    factor = LOUDNESS_RMS / waveform.square().mean().sqrt()
    for parameter in last.parameters():
        parameter.mul_(factor)
