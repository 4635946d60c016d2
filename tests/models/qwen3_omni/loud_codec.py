"""Small codec decoders whose output is loud, and neither clipped nor blind to their input."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3OmniMoeCode2Wav
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)

TINY = {
    "codebook_size": 32,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_quantizers": 4,
    "sliding_window": 8,
    "upsample_rates": (4, 3),
    "upsampling_ratios": (2, 2),
    "decoder_dim": 32,
}
REAL_SHAPE = {  # The released model's, narrower.
    "codebook_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_quantizers": 16,
    "sliding_window": 72,
    "upsample_rates": (8, 5, 4, 3),
    "upsampling_ratios": (2, 2),
    "decoder_dim": 64,
}
LOUD_RMS = 0.05


def loud_codec(settings: dict[str, Any], seed: int = 0) -> Qwen3OmniMoeCode2Wav:
    """Every branch counts: layer scales and ConvNeXt's gamma are near 1 instead of near 0. Weights
    are small enough for rounding errors not to grow on the way."""
    torch.manual_seed(seed)
    module = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeCode2WavConfig(**settings))
    module.eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            inputs = parameter[0].numel()
            parameter.normal_(0, 0.6 * inputs**-0.5)
        elif name.endswith(("scale", "gamma")):
            parameter.uniform_(0.5, 1.0)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.1)
    module.code_embedding.weight.normal_(0, settings["num_quantizers"] ** 0.5)
    _scale_output(module, random_codes(settings, 1, 24, seed=99), rms=0.2)
    return module


def _scale_output(module: Qwen3OmniMoeCode2Wav, codes: torch.Tensor, *, rms: float) -> None:
    last = module.decoder[-1].conv
    caught: list[torch.Tensor] = []
    handle = last.register_forward_hook(lambda _, __, out: caught.append(out))
    module(codes.transpose(1, 2))
    handle.remove()
    last.weight.mul_(rms / caught[0].std())
    last.bias.zero_()


def one_pass(module: Qwen3OmniMoeCode2Wav, codes: torch.Tensor) -> torch.Tensor:
    """(B, T, num_quantizers) → (B, samples)."""
    return module(codes.transpose(1, 2))[:, 0]


def random_codes(settings: dict[str, Any], batch: int, frames: int, *, seed: int) -> torch.Tensor:
    """(batch, frames, num_quantizers) int64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, frames, settings["num_quantizers"])
    return torch.randint(settings["codebook_size"], shape, generator=generator)
