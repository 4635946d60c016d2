"""Top-k and top-p thresholds without sorting, for CUDA: what `filters.ordered_threshold` finds.

Both are the lowest value such that what lies strictly above it, counted or weighed, is less than a
target. A survey weighs each row at a few bounds; the tokens above the first bound that certainly
holds the threshold are set apart; a binary search over the bits of their float32 finds it. Scaled
logits are at most 0, so that the bits of their magnitudes order them (the transform of "Radix
Tricks", M. Herf, 2001, without its signs).

Top-k's threshold is exact, ties included. Top-p's is a value of the row, too, but masses are sums
of float32 in another order (sums of strided lanes, then a tree) of another `exp` than torch's: the
two may place the boundary a token apart where the mass before it is within about 1e-5 of the total
from top_p. The sums are monotone, for adding a term never lowers a rounded sum of the same shape,
so the search is well defined and its result the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omnistage.ar.sampling.row_state import FLOATS, INTEGERS, SamplerState
from omnistage.ar.sampling.triton_draw import TEMPERATURE, scaled_logits, splits_and_chunk

SURVEY_TILE = 512
GATHER_TILE = 1024
SEARCH_TILE = 4096
LARGEST_VOCABULARY = 2**24
"""Tokens are counted in float32."""

LEVELS = tl.constexpr(8)
MARGIN = tl.constexpr(1 + 2.0**-13)
"""How much more than top_p's share the tokens set apart must weigh: far above the rounding of a sum
of 152,000 float32 in 64 chunks."""
INFINITE = tl.constexpr(0x7F800000)
BEYOND = tl.constexpr(0x7FFFFFFF)
TOP_P = tl.constexpr(FLOATS.index("top_p"))
TOP_K = tl.constexpr(INTEGERS.index("top_k"))


@triton.jit
def _bounds(level):
    """Level → scaled logit: -0.5, -2, -4.5 … -24.5, and everything."""
    below = (level + 1).to(tl.float32)
    return tl.where(level == LEVELS - 1, float("-inf"), -0.5 * below * below)


@triton.jit
def _filter_of(rows, floats, integers, float_stride, integer_stride, vocab_size):
    """temperature, top_k (0: none), top_p, and whether this row of the batch has a filter."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    temperature = tl.load(floats + row * float_stride + TEMPERATURE)
    top_p = tl.load(floats + row * float_stride + TOP_P)
    top_k = tl.load(integers + row * integer_stride + TOP_K)
    top_k = tl.minimum(top_k, vocab_size).to(tl.int32)
    return temperature, top_k, top_p, (temperature > 0) & ((top_k > 0) | (top_p < 1))


@triton.jit
def _survey(
    logits, best, rows, floats, integers, counts, masses,
    vocab_size, row_stride, chunk, float_stride, integer_stride,
    SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: rows of the batch, splits. Tokens at and above each bound: how many, and their mass."""
    batch_row = tl.program_id(0)
    split = tl.program_id(1)
    temperature, _top_k, _top_p, filtered = _filter_of(
        rows, floats, integers, float_stride, integer_stride, vocab_size
    )
    highest = tl.load(best + batch_row).to(tl.float32)
    begin = split * chunk
    end = tl.minimum(begin + chunk, vocab_size)
    stop = tl.where(filtered, end, begin)
    level = tl.arange(0, LEVELS)
    bounds = _bounds(level)
    count = tl.zeros([LEVELS, TILE], tl.int32)
    mass = tl.zeros([LEVELS, TILE], tl.float32)
    logits += batch_row.to(tl.int64) * row_stride
    for start in range(begin, stop, TILE):
        place = start + tl.arange(0, TILE)
        scaled = scaled_logits(logits, place, end, highest, temperature)
        above = (scaled[None, :] >= bounds[:, None]) & (scaled > float("-inf"))[None, :]
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp(scaled)[None, :], 0.0)
    out = (batch_row * LEVELS + level) * SPLITS + split
    tl.store(counts + out, tl.sum(count, 1))
    tl.store(masses + out, tl.sum(mass, 1))


@triton.jit
def _gather(
    logits, best, rows, floats, integers, counts, masses, magnitudes, lengths, totals,
    vocab_size, row_stride, chunk, float_stride, integer_stride,
    SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: rows of the batch, splits. Magnitudes of the tokens that hold the threshold, in order
    at the beginning of the split's chunk."""
    batch_row = tl.program_id(0)
    split = tl.program_id(1)
    temperature, top_k, top_p, filtered = _filter_of(
        rows, floats, integers, float_stride, integer_stride, vocab_size
    )
    level = tl.arange(0, LEVELS)
    parts = (batch_row * LEVELS + level)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    count = tl.sum(tl.load(counts + parts), 1)
    mass = tl.sum(tl.load(masses + parts), 1)
    total = tl.max(mass, 0)
    by_k = (top_k > 0) & (count >= top_k)
    by_p = (top_k == 0) & (mass >= total * top_p * MARGIN)
    bound = _bounds(tl.min(tl.where(by_k | by_p, level, LEVELS - 1), 0))
    highest = tl.load(best + batch_row).to(tl.float32)
    begin = split * chunk
    end = tl.minimum(begin + chunk, vocab_size)
    stop = tl.where(filtered, end, begin)
    logits += batch_row.to(tl.int64) * row_stride
    magnitudes += (batch_row * SPLITS + split).to(tl.int64) * chunk
    length = tl.zeros((), tl.int32)
    for start in range(begin, stop, TILE):
        place = start + tl.arange(0, TILE)
        scaled = scaled_logits(logits, place, end, highest, temperature)
        keep = (scaled >= bound) & (scaled > float("-inf"))
        order = length + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(magnitudes + order, tl.abs(scaled).to(tl.int32, bitcast=True), keep)
        length += tl.sum(keep.to(tl.int32), 0)
    tl.store(lengths + batch_row * SPLITS + split, length)
    if split == 0:
        tl.store(totals + batch_row, total)


@triton.jit
def _before(
    magnitudes, lengths, longest, chunk, stop,
    BY_MASS: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Number or mass of the tokens whose magnitude is less than `stop`."""
    found = tl.zeros([SPLITS, WIDTH], tl.float32)
    for start in range(0, longest, WIDTH):
        column = start + tl.arange(0, WIDTH)
        magnitude = tl.load(
            magnitudes + tl.arange(0, SPLITS)[:, None] * chunk + column[None, :],
            column[None, :] < lengths[:, None],
            other=BEYOND,
        )
        weight = tl.full([SPLITS, WIDTH], 1.0, tl.float32)
        if BY_MASS:
            weight = tl.exp(-magnitude.to(tl.float32, bitcast=True))
        found += tl.where(magnitude < stop, weight, 0.0)
    return tl.sum(tl.sum(found, 1), 0)


@triton.jit
def _largest(
    magnitudes, lengths, longest, chunk, target,
    BY_MASS: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The largest magnitude with less than `target` before it."""
    found = tl.zeros((), tl.int32)
    bit = tl.full((), 1 << 30, tl.int32)
    for _ in range(31):
        tried = found | bit
        before = _before(magnitudes, lengths, longest, chunk, tried, BY_MASS, SPLITS, WIDTH)
        found = tl.where(before < target, tried, found)
        bit = bit >> 1
    return tl.minimum(found, INFINITE)


@triton.jit
def _search(
    magnitudes, lengths, totals, rows, floats, integers, out,
    vocab_size, chunk, float_stride, integer_stride, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: rows of the batch."""
    batch_row = tl.program_id(0)
    _temperature, top_k, top_p, filtered = _filter_of(
        rows, floats, integers, float_stride, integer_stride, vocab_size
    )
    length = tl.load(lengths + batch_row * SPLITS + tl.arange(0, SPLITS))
    longest = tl.max(length, 0)
    magnitudes += batch_row.to(tl.int64) * SPLITS * chunk
    total = tl.load(totals + batch_row)
    found = tl.full((), INFINITE, tl.int32)
    if filtered & (top_k > 0):
        target = top_k.to(tl.float32)
        found = _largest(magnitudes, length, longest, chunk, target, False, SPLITS, WIDTH)
        total = _before(magnitudes, length, longest, chunk, found + 1, True, SPLITS, WIDTH)
    if filtered & (top_p < 1):
        target = total * top_p
        by_p = _largest(magnitudes, length, longest, chunk, target, True, SPLITS, WIDTH)
        found = tl.minimum(found, by_p)
    tl.store(out + batch_row, 0.0 - found.to(tl.float32, bitcast=True))


def ordered_thresholds(
    logits: torch.Tensor, best: torch.Tensor, rows: torch.Tensor, state: SamplerState
) -> torch.Tensor:
    """(R,) float32, of (logit - best) / temperature: top_k, then top_p among what it left; -inf for
    rows that have neither or are greedy.

    logits (R, V) of any float type, rows dense, V at most `LARGEST_VOCABULARY`; best (R,) their
    maxima; rows (R,) integers. Capturable: two reads of the logits and three kernels; the search
    reads only what was set apart, up to 63 times, in the cache. Needs R * V * 4 bytes for a moment.
    """
    count, vocab_size = logits.shape
    assert logits.stride(1) == 1, "logits of a row must lie side by side"
    assert vocab_size <= LARGEST_VOCABULARY, f"{vocab_size} tokens cannot be counted in float32"
    splits, chunk = splits_and_chunk(count, vocab_size)
    floats, integers, device = state.floats, state.integers, logits.device
    counts = torch.empty(count, LEVELS.value, splits, dtype=torch.int32, device=device)
    masses = torch.empty(count, LEVELS.value, splits, dtype=torch.float32, device=device)
    magnitudes = torch.empty(count, splits, chunk, dtype=torch.int32, device=device)
    lengths = torch.empty(count, splits, dtype=torch.int32, device=device)
    totals = torch.empty(count, dtype=torch.float32, device=device)
    out = torch.empty(count, dtype=torch.float32, device=device)
    params = (rows, floats, integers)
    sizes = (vocab_size, logits.stride(0), chunk, floats.stride(0), integers.stride(0), splits)
    _survey[(count, splits)](
        logits, best, *params, counts, masses, *sizes, SURVEY_TILE, num_warps=4
    )
    _gather[(count, splits)](
        logits, best, *params, counts, masses, magnitudes, lengths, totals, *sizes, GATHER_TILE,
        num_warps=4,
    )  # fmt: skip
    _search[(count,)](
        magnitudes, lengths, totals, *params, out, vocab_size, chunk, *sizes[3:],
        SEARCH_TILE // splits, num_warps=8,
    )  # fmt: skip
    return out
