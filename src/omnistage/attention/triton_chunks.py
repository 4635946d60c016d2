"""Prefill over a paged cache as one kernel: chunks of many sequences, each causal on its own cache.

A program takes some queries of one chunk, with all query heads of one head of keys as rows of one
matrix product. Flash attention (Dao et al. 2022) with keys read through the block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from omnistage.attention.paged import PagedKV

KEYS = 64
"""Keys that a program takes at a time."""
ROWS = 128
"""Queries times heads of a group that a program holds, about."""


class Tiles(NamedTuple):
    """What each program of a step does, on the device, int32. `places` (tiles, 2): its chunk, and
    the first of its queries in the chunk. `bounds` (chunks, 3): a chunk's first packed token, its
    length, its context."""

    places: torch.Tensor
    bounds: torch.Tensor
    queries: int


def plan_tiles(
    starts: Sequence[int],
    lengths: Sequence[int],
    contexts: Sequence[int],
    group: int,
    device: torch.device | str,
) -> Tiles:
    """Tiles for chunks that begin at packed tokens `starts`."""
    queries = max(16, ROWS // triton.next_power_of_2(group))
    places = [(c, f) for c, n in enumerate(lengths) for f in range(0, n, queries)]
    # Programs with the most keys first: the last ones to finish are then short.
    places.sort(key=lambda place: lengths[place[0]] - contexts[place[0]] - place[1])
    host = torch.tensor(places, dtype=torch.int32)
    bounds = torch.tensor(list(zip(starts, lengths, contexts, strict=True)), dtype=torch.int32)
    if torch.device(device).type == "cuda":
        host, bounds = host.pin_memory(), bounds.pin_memory()
    return Tiles(host.to(device, non_blocking=True), bounds.to(device, non_blocking=True), queries)


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=["tables"])
def _chunks(
    query, keys, values, tables, tiles, bounds, out,
    scale, softcap, table_width, q_token, q_head,
    k_block, k_token, k_head, v_block, v_token, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, heads of keys."""
    chunk = tl.load(tiles + tl.program_id(0) * 2)
    first = tl.load(tiles + tl.program_id(0) * 2 + 1)
    head = tl.program_id(1)
    start = tl.load(bounds + chunk * 3)
    length = tl.load(bounds + chunk * 3 + 1)
    context = tl.load(bounds + chunk * 3 + 2)
    row = tl.arange(0, QUERIES * GROUP_PAD)
    member = row % GROUP_PAD
    place = first + row // GROUP_PAD
    asked = (member < GROUP) & (place < length)
    position = context - length + place
    depth = tl.arange(0, HEAD_PAD)
    width = tl.arange(0, VALUE_PAD)
    token = (start + place).to(tl.int64)
    query_head = head * GROUP + member
    q = tl.load(
        query + (token * q_token + query_head * q_head)[:, None] + depth[None, :],
        asked[:, None] & (depth < HEAD_DIM)[None, :],
        other=0.0,
    )
    oldest = context - length + first
    newest = tl.minimum(oldest + QUERIES, context)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(oldest - WINDOW + 1, 0) // KEYS * KEYS
    highest = tl.full([QUERIES * GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([QUERIES * GROUP_PAD], tl.float32)
    result = tl.zeros([QUERIES * GROUP_PAD, VALUE_PAD], tl.float32)
    for at in range(begin, newest, KEYS):
        key = at + tl.arange(0, KEYS)
        inside = key < newest
        block = tl.load(tables + chunk * table_width + key // BLOCK, inside, other=0).to(tl.int64)
        offset = key % BLOCK
        k = tl.load(
            keys + (block * k_block + offset * k_token)[:, None] + head * k_head + depth[None, :],
            inside[:, None] & (depth < HEAD_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scaled = scores / softcap
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scaled) + 1.0))
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
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
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + (token * HEADS + query_head)[:, None] * VALUE_DIM + width[None, :],
        result.to(out.dtype.element_ty),
        asked[:, None] & (width < VALUE_DIM)[None, :],
    )


def attend_chunks(
    query: torch.Tensor,
    kv: PagedKV,
    block_tables: torch.Tensor,
    tiles: Tiles,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """query (T, heads, head_dim), its last dimension dense, → out (T, heads, value_dim) dense, both
    indexed by the packed tokens that `tiles` name; block_tables (chunks, W) int32."""
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = kv.keys.shape[2], kv.values.shape[3]
    group = heads // kv_heads
    k, v = kv.keys.stride(), kv.values.stride()
    _chunks[(tiles.places.shape[0], kv_heads)](
        query, kv.keys, kv.values, block_tables, tiles.places, tiles.bounds, out,
        scale, softcap or 0.0, block_tables.stride(0), query.stride(0), query.stride(1),
        k[0], k[1], k[2], v[0], v[1], v[2],
        heads, group, triton.next_power_of_2(group), tiles.queries,
        head_dim, max(16, triton.next_power_of_2(head_dim)),
        value_dim, max(16, triton.next_power_of_2(value_dim)),
        kv.keys.shape[1], KEYS, window or 0, softcap is not None,
        num_warps=8, num_stages=2,
    )  # fmt: skip
