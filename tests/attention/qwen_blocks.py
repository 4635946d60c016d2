"""A Qwen-Image transformer of two small blocks, and its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

TEXT_WIDTH = 64
SIDE = 6
IMAGE_TOKENS = SIDE * SIDE


def transformer(**overrides: Any) -> QwenImageTransformer2DModel:
    shape: dict[str, Any] = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT_WIDTH,
        "axes_dims_rope": (8, 12, 12),
    }
    model = QwenImageTransformer2DModel(**shape | overrides).eval()
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 0.5 if "norm" in name else 0.12
        parameter.data = torch.randn(parameter.shape, generator=random) * scale
    return model.requires_grad_(False)


def inputs(lengths: Sequence[int], *, width: int | None = None) -> dict[str, Any]:
    """Keyword arguments of the transformer; text past a sample's length holds large noise."""
    random = torch.Generator().manual_seed(1)
    batch, width = len(lengths), width or max(lengths)
    text = torch.randn(batch, width, TEXT_WIDTH, generator=random)
    for row, length in enumerate(lengths):
        text[row, length:] *= 1e3
    return {
        "hidden_states": torch.randn(batch, IMAGE_TOKENS, 16, generator=random),
        "encoder_hidden_states": text,
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, SIDE, SIDE)]] * batch,
        "return_dict": False,
    }


def alone(given: dict[str, Any], row: int, length: int) -> dict[str, Any]:
    """One sample of a batch, without its padding."""
    one = slice(row, row + 1)
    return given | {
        "hidden_states": given["hidden_states"][one],
        "encoder_hidden_states": given["encoder_hidden_states"][one, :length],
        "timestep": given["timestep"][one],
        "img_shapes": given["img_shapes"][one],
    }


def text_lengths(*lengths: int) -> dict[str, Any]:
    return {"attention_kwargs": {"text_lengths": torch.tensor(lengths)}}
