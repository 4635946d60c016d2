"""Counter-based noise: a pure function of (seed, position, token id).

Gumbel's trick as a race: the token with the largest p / E, E independent Exp(1), is a draw from p.
Because E depends on nothing but seed, position and token, a row draws the same token whatever else
is in the batch, on any row, after any preemption, and in a replayed graph; and a small change of p
rarely changes the token.
"""

from __future__ import annotations

import torch

GOLDEN_64 = 0x9E3779B97F4A7C15
MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014."""
MIX_32 = (0x7FEB352D, 0x846CA68B)
"""Multipliers of the 32-bit mixer "lowbias32" (C. Wellons, "Prospecting for hash functions")."""
LARGEST_UNIFORM = 1 - 2.0**-24


def _signed(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """Splitmix64's finalizer on int64 of any shape."""
    x = (x ^ _shift_right(x, 30)) * _signed(MIX_64[0], 64)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX_64[1], 64)
    return x ^ _shift_right(x, 31)


def signed_seed(seed: int) -> int:
    """Any Python integer as the int64 that stands for it."""
    return _signed(seed, 64)


def token_hashes(vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """(vocab_size,) int32, what the noise knows a token by."""
    ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    return mix64(ids * _signed(GOLDEN_64, 64)).to(torch.int32)


def step_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(R,) int64 each → (R,) int64, one key per (seed, position)."""
    return mix64(mix64(seeds) + (positions + 1) * _signed(GOLDEN_64, 64))


def exponential_noise(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """keys (R,) int64, hashes (V,) or (R, K) int32 → float32 (R, V) or (R, K) of Exp(1) draws.

    The arithmetic shifts are meant: what they lose is one of 32 bits, and 31 are used.
    """
    low = keys.to(torch.int32).unsqueeze(1)
    high = (keys >> 32).to(torch.int32).unsqueeze(1)
    x = (hashes ^ low).mul_(_signed(MIX_32[0], 32))
    x.bitwise_xor_(x >> 16).add_(high).mul_(_signed(MIX_32[1], 32))
    x.bitwise_xor_(x >> 15).bitwise_and_(0x7FFFFFFF)
    uniform = x.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()
