"""The draw of `Sampler._draw` as one pass over the logits and a small join, for CUDA.

The race is that of `random.py`: the same integers, so the same uniform numbers, and the same
`exp(scaled) / noise`. What differs is rounding: `exp` is the card's fast one (relative error about
1e-7 * (1 + |scaled|)) and log1p is `log(1 - u) * u / u'` with u' = 1 - (1 - u) (Kahan; D. Goldberg,
"What every computer scientist should know about floating-point arithmetic", theorem 4), so a token
may differ from the eager path's where two tokens race within about 1e-6 of each other. Exact ties
go to the lowest token id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omnistage.ar.sampling import random
from omnistage.ar.sampling.row_state import FLOATS, INTEGERS, SamplerState

TILE = 1024
"""Logits that a program takes at a time."""
PROGRAMS = 1024
"""Programs wanted a step: several for every processor of today's cards."""
MAX_SPLITS = 64

GOLDEN = tl.constexpr(random._signed(random.GOLDEN_64, 64))
FIRST_64 = tl.constexpr(random._signed(random.MIX_64[0], 64))
SECOND_64 = tl.constexpr(random._signed(random.MIX_64[1], 64))
FIRST_32 = tl.constexpr(random._signed(random.MIX_32[0], 32))
SECOND_32 = tl.constexpr(random._signed(random.MIX_32[1], 32))
LARGEST_UNIFORM = tl.constexpr(random.LARGEST_UNIFORM)
TEMPERATURE = tl.constexpr(FLOATS.index("temperature"))
MIN_P = tl.constexpr(FLOATS.index("min_p"))
SEED = tl.constexpr(INTEGERS.index("seed"))


@triton.jit
def _mix64(x):
    """`random.mix64`: the masks make the shifts logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST_64
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND_64
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise(key, hashes):
    """`random.exponential_noise` of one row's key, int64."""
    x = (hashes ^ key.to(tl.int32)) * FIRST_32
    x = ((x ^ (x >> 16)) + (key >> 32).to(tl.int32)) * SECOND_32
    x = (x ^ (x >> 15)) & 0x7FFFFFFF
    uniform = tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, LARGEST_UNIFORM)
    rest = 1.0 - uniform
    lost = 1.0 - rest
    logarithm = -tl.log(rest) * tl.div_rn(uniform, tl.where(lost > 0, lost, 1.0))
    return tl.where(lost > 0, logarithm, uniform)


@triton.jit
def scaled_logits(logits, place, end, best, temperature):
    """float32 (logit - best) / temperature, rounded as torch rounds; -inf from `end` on."""
    x = tl.load(logits + place, place < end, other=float("-inf")).to(tl.float32)
    return tl.where(place < end, tl.div_rn(x - best, temperature), float("-inf"))


@triton.jit
def _race(
    logits, best, hashes, rows, positions, floats, integers, thresholds, times, ids,
    vocab_size, row_stride, chunk, float_stride, integer_stride,
    SPLITS: tl.constexpr, TILE: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Grid: rows of the batch, splits."""
    batch_row = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + batch_row).to(tl.int64)
    temperature = tl.load(floats + row * float_stride + TEMPERATURE)
    min_p = tl.load(floats + row * float_stride + MIN_P)
    threshold = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
    if FILTERED:
        threshold = tl.maximum(threshold, tl.load(thresholds + batch_row))
    seed = tl.load(integers + row * integer_stride + SEED)
    position = tl.load(positions + batch_row).to(tl.int64)
    key = _mix64(_mix64(seed) + (position + 1) * GOLDEN)
    highest = tl.load(best + batch_row).to(tl.float32)
    begin = split * chunk
    end = tl.minimum(begin + chunk, vocab_size)
    stop = tl.where(temperature > 0, end, begin)
    lane = tl.arange(0, TILE)
    fastest = tl.full([TILE], -1.0, tl.float32)
    winner = tl.zeros([TILE], tl.int32)
    logits += batch_row.to(tl.int64) * row_stride
    for start in range(begin, stop, TILE):
        place = start + lane
        scaled = scaled_logits(logits, place, end, highest, temperature)
        noise = _noise(key, tl.load(hashes + place, place < end, other=0))
        weight = tl.where(scaled >= threshold, tl.exp(scaled), 0.0)
        speed = tl.where(place < end, tl.div_rn(weight, noise), -1.0)
        winner = tl.where(speed > fastest, place, winner)
        fastest = tl.maximum(speed, fastest)
    top = tl.max(fastest, 0)
    tl.store(times + batch_row * SPLITS + split, top)
    tl.store(ids + batch_row * SPLITS + split, tl.min(tl.where(fastest == top, winner, 2**30), 0))


@triton.jit
def _pick(
    times, ids, greedy, rows, floats, out, float_stride, SPLITS: tl.constexpr
):  # fmt: skip
    """Grid: rows of the batch."""
    batch_row = tl.program_id(0)
    row = tl.load(rows + batch_row).to(tl.int64)
    temperature = tl.load(floats + row * float_stride + TEMPERATURE)
    split = tl.arange(0, SPLITS)
    speed = tl.load(times + batch_row * SPLITS + split)
    token = tl.load(ids + batch_row * SPLITS + split)
    token = tl.min(tl.where(speed == tl.max(speed, 0), token, 2**30), 0).to(tl.int64)
    tl.store(out + batch_row, tl.where(temperature > 0, token, tl.load(greedy + batch_row)))


def splits_and_chunk(rows: int, vocab_size: int) -> tuple[int, int]:
    """Programs a row, a power of two, and the logits of each, full tiles."""
    wanted = min(MAX_SPLITS, PROGRAMS // max(rows, 1), triton.cdiv(vocab_size, TILE))
    splits = 1 << max(0, wanted.bit_length() - 1)
    return splits, triton.cdiv(triton.cdiv(vocab_size, splits), TILE) * TILE


def draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    greedy: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplerState,
    *,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """(R,) int64 tokens: `greedy` (R,) int64 where a row's temperature is 0, else drawn.

    logits (R, V) of any float type, rows dense, and their maxima `best` (R,); rows and positions
    (R,) of any integer type, as `Sampler.sample` has them. A token is drawn from those whose
    (logit - best) / temperature is at least log(min_p) and the `thresholds` (R,) float32. Where
    none is (no numbers), the token is 0. Capturable: one read of the logits, two kernels.
    """
    count, vocab_size = logits.shape
    assert logits.stride(1) == 1, "logits of a row must lie side by side"
    splits, chunk = splits_and_chunk(count, vocab_size)
    times = torch.empty(count, splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, splits, dtype=torch.int32, device=logits.device)
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    floats, integers = state.floats, state.integers
    _race[(count, splits)](
        logits, best, state.hashes, rows, positions, floats, integers, thresholds, times, ids,
        vocab_size, logits.stride(0), chunk, floats.stride(0), integers.stride(0),
        splits, TILE, thresholds is not None, num_warps=4,
    )  # fmt: skip
    _pick[(count,)](times, ids, greedy, rows, floats, out, floats.stride(0), splits, num_warps=1)
    return out
