"""Weights that make a tiny random language model behave: what it says depends on all it was told,
and no two next tokens are nearly as likely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .family import Assembler

EMBEDDING_STD = 0.05
HEAD_STD = 0.5
GAIN = 4.0
CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d


@torch.no_grad()
def loud_for_a_tied_head(norm: nn.Module) -> None:
    """Make the last norm's scale as much larger as the head is smaller for being the embeddings."""
    norm.weight.add_(HEAD_STD / EMBEDDING_STD - 1)


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
    convolutions; experts are stacks of matrices), so that attention is choosy; vectors are what
    their class made them plus noise. Embeddings are small beside what layers add, lest a model
    repeats its last token for ever, and heads large enough that logits spread by several units: the
    classes' own initialization (0.02) gives almost flat ones.
    """
    looked_up = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    filters = {
        id(part.weight): part.weight[0].numel()
        for part in model.modules()
        if isinstance(part, CONVOLUTIONS)
    }
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.1 * noise)
        elif id(parameter) in looked_up:
            parameter.copy_(EMBEDDING_STD * noise)
        elif "head" in name.split(".")[-2]:
            parameter.copy_(HEAD_STD * noise)
        else:
            fan_in = filters.get(id(parameter), parameter.shape[-1])
            parameter.copy_(noise * (GAIN / fan_in) ** 0.5)
