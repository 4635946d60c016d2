"""RMS norm, rotary embedding and joining of q, k and v in one pass over memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from omnistage.attention.joint_math import Preparation, Projections


class Tile(NamedTuple):
    """A program's share: `rows` tokens of `heads` heads, one after the other."""

    rows: int
    heads: int
    warps: int


TILES = {
    16: Tile(128, 2, 8),
    32: Tile(64, 2, 8),
    64: Tile(32, 2, 8),
    128: Tile(16, 2, 8),
    256: Tile(8, 2, 8),
}
"""By head size: a thread holds eight elements of each of q, k and v, 16 bytes of a half type, so
that a row's tile needs no exchange through shared memory. See `benchmarks/joint_attention.py`."""


@triton.jit
def _normalized(x, weight, eps, HEAD_DIM: tl.constexpr):
    """In float32 what the library's RMSNorm gives: rounded to the weight's type, before the
    weight and after it."""
    wide = x.to(tl.float32)
    variance = tl.sum(wide * wide, axis=1) * (1.0 / HEAD_DIM)
    scaled = wide * tl.rsqrt(variance + eps)[:, None]
    scaled = scaled.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    return scaled.to(weight.dtype).to(tl.float32)


@triton.jit
def _rotated(x, cosine, sine, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (ROWS, HEAD_DIM // 2, 2)))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return tl.reshape(turned, (ROWS, HEAD_DIM))


@triton.jit
def _move(
    q, k, v, norm_q, norm_k, frequencies, joint_q, joint_k, joint_v,
    first_row, rows, source, row_stride, target, width, eps,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """`source` and `target`: offsets of the stream's first row in a projection, whose rows are
    `row_stride` apart, and in a buffer, where they are `width` apart."""
    row = first_row + tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM)
    inside = (row < rows)[:, None]
    turns = tl.load(frequencies + row[:, None] * HEAD_DIM + column[None, :], inside, other=0.0)
    cosine, sine = tl.split(tl.reshape(turns, (ROWS, HEAD_DIM // 2, 2)))
    weight_q = tl.load(norm_q + column)
    weight_k = tl.load(norm_k + column)
    first_column = tl.program_id(1) * HEADS * HEAD_DIM
    taken = row.to(tl.int64)[:, None] * row_stride + (first_column + column)[None, :]
    put = row.to(tl.int64)[:, None] * width + (first_column + column)[None, :]
    for _ in tl.static_range(HEADS):
        of_q = tl.load(q + source + taken, inside, other=0.0)
        of_k = tl.load(k + source + taken, inside, other=0.0)
        of_v = tl.load(v + source + taken, inside, other=0.0)
        tl.store(joint_v + target + put, of_v, inside)
        of_q = _rotated(_normalized(of_q, weight_q, eps, HEAD_DIM), cosine, sine, ROWS, HEAD_DIM)
        of_k = _rotated(_normalized(of_k, weight_k, eps, HEAD_DIM), cosine, sine, ROWS, HEAD_DIM)
        tl.store(joint_q + target + put, of_q.to(joint_q.dtype.element_ty), inside)
        tl.store(joint_k + target + put, of_k.to(joint_k.dtype.element_ty), inside)
        taken += HEAD_DIM
        put += HEAD_DIM


@triton.jit(do_not_specialize=["image_rows", "text_rows"])
def _join(
    image_q, image_k, image_v, text_q, text_k, text_v,
    norm_q, norm_k, norm_added_q, norm_added_k, image_turns, text_turns,
    joint_q, joint_k, joint_v,
    image_rows, text_rows, image_stride, image_row_stride, text_stride, text_row_stride, width, eps,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows (image, then text), groups of heads, samples."""
    tile = tl.program_id(0)
    sample = tl.program_id(2).to(tl.int64)
    image_tiles = tl.cdiv(image_rows, ROWS)
    target = sample * (image_rows + text_rows) * width
    if tile < image_tiles:
        _move(
            image_q, image_k, image_v, norm_q, norm_k, image_turns, joint_q, joint_k, joint_v,
            tile * ROWS, image_rows, sample * image_stride, image_row_stride, target, width, eps,
            ROWS, HEADS, HEAD_DIM,
        )  # fmt: skip
    else:
        _move(
            text_q, text_k, text_v, norm_added_q, norm_added_k, text_turns,
            joint_q, joint_k, joint_v,
            (tile - image_tiles) * ROWS, text_rows, sample * text_stride, text_row_stride,
            target + image_rows.to(tl.int64) * width, width, eps,
            ROWS, HEADS, HEAD_DIM,
        )  # fmt: skip


def tile_for(head_dim: int, heads: int) -> Tile:
    """The table's tile, with a number of heads that divides the heads there are."""
    tile = TILES[head_dim]
    return tile if heads % tile.heads == 0 else tile._replace(heads=1)


def join_with_triton(
    image: Projections, text: Projections, preparation: Preparation, tile: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `join_in_torch`, which it equals up to the last bit of a rounding.

    Projections of one dtype (bfloat16, float16 or float32) on one device, rows dense, a
    stream's q, k and v with equal strides. Raises `ValueError` for norm weights of
    another dtype or device.
    """
    _check(image.q, preparation)
    batch, image_rows, width = image.q.shape
    text_rows, head_dim = text.q.shape[1], preparation.head_dim
    heads = width // head_dim
    tile = tile or tile_for(head_dim, heads)
    shape = (batch, image_rows + text_rows, heads, head_dim)
    joint = tuple(image.q.new_empty(shape) for _ in "qkv")
    tiles = triton.cdiv(image_rows, tile.rows) + triton.cdiv(text_rows, tile.rows)
    _join[(tiles, heads // tile.heads, batch)](
        *image, *text, *preparation.norm_weights, *preparation.frequencies, *joint,
        image_rows, text_rows, *image.q.stride()[:2], *text.q.stride()[:2], width, preparation.eps,
        tile.rows, tile.heads, head_dim, num_warps=tile.warps,
    )  # fmt: skip
    q, k, v = joint
    return q, k, v


def _check(like: torch.Tensor, preparation: Preparation) -> None:
    for weight in preparation.norm_weights:
        if weight.dtype != like.dtype or weight.device != like.device:
            raise ValueError(
                f"a norm's weight is {weight.dtype} on {weight.device}, but its input is "
                f"{like.dtype} on {like.device}: keep both together"
            )
