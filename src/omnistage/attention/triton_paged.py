"""Decoding over a paged cache as one kernel: one query token a sequence, keys split over programs.

A sequence's keys are divided among `splits` programs (flash decoding, Dao et al. 2023), whose
partial results a second kernel joins. Captured graphs keep `splits`; lengths are the device's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omnistage.attention.paged import PagedKV

TILE, SHORT_TILE = 64, 32
"""Keys that a program takes at a time; the second where few sequences are split finely."""
FINE_SPLITS = 16
MIN_DOT_ROWS = 16
"""Rows that the tensor cores' smallest product has: fewer query heads a group are padded."""
MAX_SPLITS = 32


@triton.jit
def _keep(
    key, value, keys, values, table, place, k_block, k_token, v_block, v_token,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head's key and value to position `place` of a sequence, for this program to read."""
    depth = tl.arange(0, HEAD_PAD)
    width = tl.arange(0, VALUE_PAD)
    block = tl.load(table + place // BLOCK).to(tl.int64)
    offset = place % BLOCK
    k = tl.load(key + depth, depth < HEAD_DIM)
    v = tl.load(value + width, width < VALUE_DIM)
    tl.store(keys + block * k_block + offset * k_token + depth, k, depth < HEAD_DIM)
    tl.store(values + block * v_block + offset * v_token + width, v, width < VALUE_DIM)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["table_width"])
def _decode(
    query, new_key, new_value, keys, values, tables, lengths, out, partial, stats,
    scale, softcap, table_width, key_row, value_row,
    k_block, k_token, k_head, v_block, v_token, v_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, heads of keys, splits. With WRITES the last position's key and value come
    from `new_key` and `new_value`: whose range ends there writes them, then reads them back."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, HEAD_PAD)
    width = tl.arange(0, VALUE_PAD)
    group = (sequence.to(tl.int64) * tl.num_programs(1) + head) * GROUP + row
    q = tl.load(
        query + group[:, None] * HEAD_DIM + depth[None, :],
        (row < GROUP)[:, None] & (depth < HEAD_DIM)[None, :],
        other=0.0,
    )
    length = tl.load(lengths + sequence)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    if WRITES:  # noqa: SIM102  (decided when compiling, the inner one when running)
        if (begin < length) & (end == length):
            _keep(
                new_key + sequence.to(tl.int64) * key_row + head * HEAD_DIM,
                new_value + sequence.to(tl.int64) * value_row + head * VALUE_DIM,
                keys + head * k_head, values + head * v_head,
                tables + sequence * table_width, length - 1, k_block, k_token, v_block, v_token,
                HEAD_DIM, HEAD_PAD, VALUE_DIM, VALUE_PAD, BLOCK,
            )  # fmt: skip
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < end
        block = tl.load(tables + sequence * table_width + place // BLOCK, inside, other=0)
        block = block.to(tl.int64)
        offset = place % BLOCK
        k = tl.load(
            keys + (block * k_block + offset * k_token)[:, None] + head * k_head + depth[None, :],
            inside[:, None] & (depth < HEAD_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scaled = scores / softcap
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scaled) + 1.0))
        scores = tl.where(inside[None, :], scores, float("-inf"))
        risen = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - risen[:, None])
        kept = tl.exp(highest - risen)
        total = total * kept + tl.sum(weights, 1)
        v = tl.load(
            values + (block * v_block + offset * v_token)[:, None] + head * v_head + width[None, :],
            inside[:, None] & (width < VALUE_DIM)[None, :],
            other=0.0,
        )
        result = result * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = risen
    asked = (row < GROUP)[:, None] & (width < VALUE_DIM)[None, :]
    if SPLITS == 1:
        safe = tl.where(total > 0, total, 1.0)
        tl.store(
            out + group[:, None] * VALUE_DIM + width[None, :],
            (result / safe[:, None]).to(out.dtype.element_ty),
            asked,
        )
    else:
        part = group * SPLITS + split
        tl.store(partial + part[:, None] * VALUE_DIM + width[None, :], result, asked)
        tl.store(stats + part * 2, highest, row < GROUP)
        tl.store(stats + part * 2 + 1, total, row < GROUP)


@triton.jit
def _join(
    partial, stats, out,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: query heads of all sequences."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    width = tl.arange(0, VALUE_PAD)
    part = head * SPLITS + split
    highest = tl.load(stats + part * 2)
    total = tl.load(stats + part * 2 + 1)
    weight = tl.where(total > 0, tl.exp(highest - tl.max(highest, 0)), 0.0)
    all_parts = tl.load(
        partial + part[:, None] * VALUE_DIM + width[None, :],
        (width < VALUE_DIM)[None, :],
        other=0.0,
    )
    denominator = tl.sum(weight * total, 0)
    joined = tl.sum(all_parts * weight[:, None], 0) / tl.where(denominator > 0, denominator, 1.0)
    tl.store(out + head * VALUE_DIM + width, joined.to(out.dtype.element_ty), width < VALUE_DIM)


@triton.jit
def _write(
    key, value, keys, values, slots,
    key_row, value_row, k_block, k_token, k_head, v_block, v_token, v_head,
    KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    block = slot // BLOCK
    offset = slot % BLOCK
    head = tl.arange(0, HEADS_PAD)
    depth = tl.arange(0, HEAD_PAD)
    width = tl.arange(0, VALUE_PAD)
    in_key = (head < KV_HEADS)[:, None] & (depth < HEAD_DIM)[None, :]
    in_value = (head < KV_HEADS)[:, None] & (width < VALUE_DIM)[None, :]
    k = tl.load(key + token * key_row + head[:, None] * HEAD_DIM + depth[None, :], in_key)
    v = tl.load(value + token * value_row + head[:, None] * VALUE_DIM + width[None, :], in_value)
    tl.store(
        keys + block * k_block + offset * k_token + head[:, None] * k_head + depth[None, :],
        k, in_key,
    )  # fmt: skip
    tl.store(
        values + block * v_block + offset * v_token + head[:, None] * v_head + width[None, :],
        v, in_value,
    )  # fmt: skip


def splits_for(sequences: int, kv_heads: int, processors: int) -> int:
    """Programs a sequence and head: about two a processor, a power of two."""
    wanted = 2 * processors // max(1, sequences * kv_heads)
    return min(MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def write(kv: PagedKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """key (T, kv_heads, head_dim), value (T, kv_heads, value_dim) into the slots (T,) int64. The
    last two dimensions must be dense; rows may be strided."""
    tokens, heads, head_dim = key.shape
    value_dim = value.shape[2]
    k, v = kv.keys.stride(), kv.values.stride()
    _write[(tokens,)](
        key, value, kv.keys, kv.values, slots,
        key.stride(0), value.stride(0), k[0], k[1], k[2], v[0], v[1], v[2],
        heads, triton.next_power_of_2(heads), head_dim, triton.next_power_of_2(head_dim),
        value_dim, triton.next_power_of_2(value_dim), kv.keys.shape[1], num_warps=4,
    )  # fmt: skip


def decode(
    query: torch.Tensor,
    kv: PagedKV,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 1,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """query (S, heads, head_dim) → (S, heads, value_dim); block_tables (S, W) and context_lens (S,)
    int32; `splits` a power of two. `new`: the last positions' keys (S, kv_heads, head_dim) and
    values (S, kv_heads, value_dim), their last two dimensions dense, which are written as well."""
    sequences, heads, head_dim = query.shape
    kv_heads, value_dim = kv.keys.shape[2], kv.values.shape[3]
    group = heads // kv_heads
    query = query.contiguous()
    out = query.new_empty(sequences, heads, value_dim)
    parts = sequences * heads * splits if splits > 1 else 0
    partial = query.new_empty(parts * value_dim, dtype=torch.float32)
    stats = query.new_empty(parts * 2, dtype=torch.float32)
    k, v = kv.keys.stride(), kv.values.stride()
    key, value = (kv.keys, kv.values) if new is None else new
    _decode[(sequences, kv_heads, splits)](
        query, key, value, kv.keys, kv.values, block_tables, context_lens, out, partial, stats,
        scale, softcap or 0.0, block_tables.stride(0), key.stride(0), value.stride(0),
        k[0], k[1], k[2], v[0], v[1], v[2],
        group, max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        head_dim, max(16, triton.next_power_of_2(head_dim)),
        value_dim, max(16, triton.next_power_of_2(value_dim)),
        kv.keys.shape[1], SHORT_TILE if splits >= FINE_SPLITS else TILE, splits,
        window or 0, softcap is not None, new is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join[(sequences * heads,)](
            partial, stats, out, value_dim, triton.next_power_of_2(value_dim), splits, num_warps=4
        )
    return out
