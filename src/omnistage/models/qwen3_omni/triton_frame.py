"""The next position of a codec frame: keys and values kept and attended by one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length"])
def _attend(
    query, key, value, keys, values, out, length, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, c_row, c_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Grid: rows, heads of keys."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    depth = tl.arange(0, DIM_PAD)
    inside = depth < DIM
    place = tl.arange(0, POSITIONS)
    cached = row * c_row + head * c_head
    new_key = tl.load(key + row * k_row + head * k_head + depth, inside, other=0.0)
    new_value = tl.load(value + row * v_row + head * v_head + depth, inside, other=0.0)
    tl.store(keys + cached + length * DIM + depth, new_key, inside)
    tl.store(values + cached + length * DIM + depth, new_value, inside)
    earlier = (place < length)[:, None] & inside[None, :]
    at = cached + place[:, None] * DIM + depth[None, :]
    old_keys = tl.load(keys + at, earlier, other=0.0).to(tl.float32)
    old_values = tl.load(values + at, earlier, other=0.0).to(tl.float32)
    for member in tl.static_range(GROUP):
        query_head = head * GROUP + member
        q = tl.load(query + row * q_row + query_head * q_head + depth, inside, other=0.0)
        q = q.to(tl.float32)
        old = tl.sum(old_keys * q[None, :], 1) * scale
        old = tl.where(place < length, old, float("-inf"))
        new = tl.sum(new_key.to(tl.float32) * q, 0) * scale
        highest = tl.maximum(tl.max(old, 0), new)
        weights = tl.exp(old - highest)
        new_weight = tl.exp(new - highest)
        total = tl.sum(weights, 0) + new_weight
        result = tl.sum(old_values * weights[:, None], 0) + new_value.to(tl.float32) * new_weight
        to = (row * heads * GROUP + query_head) * DIM + depth
        tl.store(out + to, (result / total).to(out.dtype.element_ty), inside)


def attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: int,
    scale: float,
) -> torch.Tensor:
    """query (B, heads, 1, dim), key and value (B, kv_heads, 1, dim), the last dimension dense; keys
    and values (rows, kv_heads, positions, dim), of which `length` positions are filled and the next
    one is written → (B, 1, heads, dim)."""
    batch, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    out = query.new_empty(batch, 1, heads, dim)
    _attend[(batch, kv_heads)](
        query, key, value, keys, values, out, length, scale,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), keys.stride(0), keys.stride(1),
        heads // kv_heads, dim, triton.next_power_of_2(dim),
        triton.next_power_of_2(keys.shape[2]), num_warps=2,
    )  # fmt: skip
    return out
