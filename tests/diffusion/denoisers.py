"""Tiny transformers of diffusers with seeded weights, and calls for them of any shape."""

from __future__ import annotations

from typing import Any

import torch

QWEN, FLUX, SD3 = "QwenImage", "Flux", "SD3"
ALL = (QWEN, FLUX, SD3)


def make(name: str, **changes: Any) -> torch.nn.Module:
    import diffusers

    torch.manual_seed(0)
    cls = getattr(diffusers, f"{name}Transformer2DModel")
    module = cls(**{**_CONFIGS[name], **changes}).eval()
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.2)
    return module


def call(
    name: str, batch: int = 2, side: int = 4, text: int = 7, *, width: int | None = None, seed=0
) -> dict[str, Any]:
    """Arguments for `batch` pictures of side x width tokens and `text` tokens of text."""
    generator = torch.Generator().manual_seed(seed)
    width = width or side
    time = torch.rand(batch, generator=generator)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if name == SD3:
        return {
            "hidden_states": noise(batch, 4, 2 * side, 2 * width),
            "encoder_hidden_states": noise(batch, text, 32),
            "pooled_projections": noise(batch, 32),
            "timestep": time,
        }
    common = {
        "hidden_states": noise(batch, side * width, 16),
        "encoder_hidden_states": noise(batch, text, 32),
        "timestep": time,
    }
    if name == QWEN:
        return common | {"img_shapes": [[(1, side, width)]] * batch}
    return common | {
        "pooled_projections": noise(batch, 32),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": _picture_ids(side, width),
        "txt_ids": torch.zeros(text, 3),
    }


def _picture_ids(side: int, width: int) -> torch.Tensor:
    ids = torch.zeros(side, width, 3)
    ids[..., 1] += torch.arange(side)[:, None]
    ids[..., 2] += torch.arange(width)
    return ids.reshape(-1, 3)


_CONFIGS: dict[str, dict[str, Any]] = {
    QWEN: {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
    FLUX: {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    },
    SD3: {
        "sample_size": 32,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 32,
    },
}
