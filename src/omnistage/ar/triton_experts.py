"""Mixture-of-experts layers for few tokens: two kernels that read each chosen expert once.

A decode step has a handful of tokens an expert, so its cost is reading weights. Shapes depend on
the number of tokens only, never on what the router chose: it can be captured in a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import grouped_mm, silu

ROWS = 16
"""Tokens of one expert that a program takes at a time: the tensor cores' smallest product."""


@triton.jit(do_not_specialize=["capacity"])
def _up(
    x, weight, members, counts, out, capacity,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Grid: experts, tiles of the inner width. out[pair] = silu(x·gate) * (x·up)."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.load(counts + expert)
    base = weight + expert.to(tl.int64) * 2 * INNER * HIDDEN
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < count
        pair = tl.load(members + expert * capacity + row, inside, other=0)
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, HIDDEN, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            tokens = tl.load(
                x + (pair // TOP_K).to(tl.int64)[:, None] * HIDDEN + depth[None, :],
                inside[:, None] & (depth < HIDDEN)[None, :],
                other=0.0,
            )
            asked = (column < INNER)[:, None] & (depth < HIDDEN)[None, :]
            place = column[:, None] * HIDDEN + depth[None, :]
            of_gate = tl.load(base + place, asked, other=0.0)
            of_up = tl.load(base + INNER * HIDDEN + place, asked, other=0.0)
            gate = tl.dot(tokens, tl.trans(of_gate), gate, input_precision="ieee")
            up = tl.dot(tokens, tl.trans(of_up), up, input_precision="ieee")
        kind = out.dtype.element_ty
        gate = gate.to(kind).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        tl.store(
            out + pair.to(tl.int64)[:, None] * INNER + column[None, :],
            (silu * up.to(kind).to(tl.float32)).to(kind),
            inside[:, None] & (column < INNER)[None, :],
        )


@triton.jit(do_not_specialize=["capacity"])
def _down(
    inner, weight, members, counts, scores, out, capacity,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Grid: experts, tiles of the hidden width. out[pair] = (inner[pair]·down) * score."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.load(counts + expert)
    base = weight + expert.to(tl.int64) * HIDDEN * INNER
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < count
        pair = tl.load(members + expert * capacity + row, inside, other=0)
        result = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, INNER, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            states = tl.load(
                inner + pair.to(tl.int64)[:, None] * INNER + depth[None, :],
                inside[:, None] & (depth < INNER)[None, :],
                other=0.0,
            )
            of_down = tl.load(
                base + column[:, None] * INNER + depth[None, :],
                (column < HIDDEN)[:, None] & (depth < INNER)[None, :],
                other=0.0,
            )
            result = tl.dot(states, tl.trans(of_down), result, input_precision="ieee")
        kind = out.dtype.element_ty
        score = tl.load(scores + pair, inside, other=0.0).to(tl.float32)
        tl.store(
            out + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :],
            (result.to(kind).to(tl.float32) * score[:, None]).to(kind),
            inside[:, None] & (column < HIDDEN)[None, :],
        )


@triton.jit(do_not_specialize=["pairs", "capacity"])
def _members(experts, members, counts, pairs, capacity, PAIRS: tl.constexpr):
    """Grid: experts."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    chosen = tl.load(experts + pair, pair < pairs, other=-1)
    mine = (chosen == expert).to(tl.int32)
    place = tl.cumsum(mine, 0) - 1
    tl.store(members + expert * capacity + place, pair, mine != 0)
    tl.store(counts + expert, tl.sum(mine, 0))


def members_of(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """experts (T, k) → for each expert its pairs (token * k + place) in order, (E * T,) int32 of
    which the first `counts` of each T mean something, and counts (E,) int32. A token never has the
    same expert twice."""
    tokens, top_k = experts.shape
    members = torch.empty(num_experts * tokens, dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    pairs = tokens * top_k
    _members[(num_experts,)](
        experts.contiguous(), members, counts, pairs, tokens, triton.next_power_of_2(pairs),
        num_warps=4,
    )  # fmt: skip
    return members, counts


def few_token_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """x (T, hidden), experts (T, k) int64, scores (T, k), gate_up (E, 2 * inner, hidden), down (E,
    hidden, inner) → (T, hidden): the sum over a token's experts, in float32, of
    `down(silu(gate(x)) * up(x)) * score`, rounded where `transformers`' grouped path rounds."""
    tokens, top_k = experts.shape
    num_experts, hidden, inner = down.shape
    members, counts = members_of(experts, num_experts)
    between = x.new_empty(tokens * top_k, inner)
    out = x.new_empty(tokens * top_k, hidden)
    scores = scores.contiguous()
    columns = 32 if tokens * top_k <= 64 else 64
    _up[(num_experts, triton.cdiv(inner, columns))](
        x.contiguous(), gate_up, members, counts, between, tokens,
        top_k, hidden, inner, ROWS, columns, 128, num_warps=4, num_stages=4,
    )  # fmt: skip
    _down[(num_experts, triton.cdiv(hidden, columns))](
        between, down, members, counts, scores, out, tokens,
        hidden, inner, ROWS, columns, 128, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out.view(tokens, top_k, hidden).sum(1)


def grouped_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The same for many tokens: sorted by expert, two grouped matrix products."""
    tokens, top_k = experts.shape
    num_experts = gate_up.shape[0]
    sorted_experts, order = torch.sort(experts.reshape(-1))
    counts = torch.histc(sorted_experts.int(), bins=num_experts, min=0, max=num_experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    both = grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, dim=-1)
    out = grouped_mm(silu(gate) * up, down.transpose(1, 2), offs=ends)
    weighted = out * scores.reshape(-1)[order].unsqueeze(-1)
    restored = torch.empty_like(weighted)
    restored[order] = weighted
    return restored.view(tokens, top_k, -1).sum(1)
