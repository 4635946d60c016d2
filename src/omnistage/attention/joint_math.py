"""Normalized, rotated and joined q, k and v of an image and a text stream, in torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Projections(NamedTuple):
    """Of one stream, each (batch, tokens, heads * head_dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def part(self, samples: slice, tokens: int) -> Projections:
        return Projections(*(each[samples, :tokens] for each in self))


class Preparation(NamedTuple):
    """What happens to q and k before attention.

    `norm_weights`: of (image q, image k, text q, text k), each (head_dim,), or empty: done already.
    `frequencies`: of (image, text), each float32 (tokens, head_dim / 2, 2) holding cosine and
    sine, or empty: rotated already.
    """

    head_dim: int
    eps: float
    norm_weights: Sequence[torch.Tensor]
    frequencies: Sequence[torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """With the rounding steps of `diffusers.models.normalization.RMSNorm`."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    normalized = x * torch.rsqrt(variance + eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalized = normalized.to(weight.dtype)
    return normalized * weight


def rotate(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of interleaved pairs without complex numbers, which Inductor cannot fuse.

    `x` (batch, tokens, heads, head_dim), `frequencies` (tokens, head_dim / 2, 2) float32.
    """
    cosine, sine = frequencies.unsqueeze(1).unbind(-1)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def join_in_torch(
    image: Projections, text: Projections, preparation: Preparation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Joint q, k, v: (batch, image tokens + text tokens, heads, head_dim), image first."""
    streams = ([*image], [*text])
    heads = [[each.unflatten(-1, (-1, preparation.head_dim)) for each in s] for s in streams]
    for stream, parts in enumerate(heads):
        for index in (0, 1):
            if preparation.norm_weights:
                weight = preparation.norm_weights[2 * stream + index]
                parts[index] = rms_norm(parts[index], weight, preparation.eps)
            if preparation.frequencies:
                turns = preparation.frequencies[stream][: parts[index].shape[1]]
                parts[index] = rotate(parts[index], turns)
    q, k, v = (torch.cat(pair, dim=1) for pair in zip(*heads, strict=True))
    return q, k, v
