"""The kernels' noise by itself. Imports Triton: only what runs kernels may import it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omnistage.ar.sampling.triton_draw import _noise


@triton.jit
def _store_noise(keys, hashes, out, size, WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)
    noise = _noise(tl.load(keys + tl.program_id(0)), tl.load(hashes + place, place < size, other=0))
    tl.store(out + tl.program_id(0) * size + place, noise, place < size)


def noise_of(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """keys (R,) int64, hashes (V,) int32 → (R, V) float32."""
    out = torch.empty(len(keys), len(hashes), device=keys.device)
    width = triton.next_power_of_2(len(hashes))
    _store_noise[(len(keys),)](keys, hashes, out, len(hashes), width)
    return out
