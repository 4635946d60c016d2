"""Paged attention in plain torch: what a CPU runs, and any device without a kernel of its own.

A sequence whose blocks lie one after another is read where it lies; others are gathered first.
Measured on two cores with 16 sequences of 100–475 tokens, 30 layers of 9 heads on 3, float32 (ms a
step): one call a sequence 38, gathering into one padded batch 87, two plain matrix products a
sequence 40; in bfloat16 33, 57 and 69.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from omnistage.attention import cpu_kernel
from omnistage.attention.cpu_kernel import DecodeKernel
from omnistage.attention.paged import PagedBackend, PagedKV, PagedStep


@dataclass(slots=True, eq=False)
class _Row:
    """Where one sequence's keys lie: from slot `first_slot` on, or in `blocks` (on the device)."""

    context: int
    first_slot: int
    blocks: torch.Tensor | None


@dataclass(slots=True, eq=False)
class TorchPagedBackend(PagedBackend):
    """See `PagedBackend`. One a thread: it keeps what the layers of one step share.

    `kernel` is that of `cpu_kernel`, for tensors on a CPU; None leaves all to torch.
    """

    kernel: DecodeKernel | None = None
    _decodes: list[_Row] = field(default_factory=list)
    _masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)

    def begin(self, step: PagedStep) -> None:
        self._masks.clear()
        block_size = step.kv[0].keys.shape[1] if step.kv else 1
        tables = step.block_tables[: step.num_decodes]
        contexts = step.context_lens[: step.num_decodes].tolist()
        self._decodes = [
            _locate(table, blocks, context, block_size)
            for table, blocks, context in zip(tables, tables.tolist(), contexts, strict=True)
        ]

    def write(
        self, kv: PagedKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        kv.keys.flatten(0, 1).index_copy_(0, slots, key)
        kv.values.flatten(0, 1).index_copy_(0, slots, value)

    def decode(
        self,
        query: torch.Tensor,
        kv: PagedKV,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """The query heads of one kv head are the queries of one call: keys are not repeated."""
        if self.kernel is not None and cpu_kernel.usable(query, kv.keys, kv.values):
            how = {"scale": scale, "window": window, "softcap": softcap}
            places = (block_tables, context_lens)
            return cpu_kernel.decode(self.kernel, query, kv.keys, kv.values, *places, **how)
        rows, heads, _ = query.shape
        kv_heads = kv.keys.shape[2]
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, -1).split(1)
        keys, values = _by_head(kv.keys.flatten(0, 1)), _by_head(kv.values.flatten(0, 1))
        attended = []
        for q, row in zip(grouped, self._decodes, strict=True):
            seen = row.context if window is None else min(row.context, window)
            k, v = _read(kv, keys, values, row, row.context - seen, seen)
            if softcap is None:
                attended.append(scaled_dot_product_attention(q, k, v, scale=scale))
            else:
                attended.append(_capped(q, k, v, None, scale, softcap))
        return torch.cat(attended).view(rows, heads, -1)

    def chunk(
        self,
        query: torch.Tensor,
        kv: PagedKV,
        block_table: torch.Tensor,
        context: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        length, heads, _ = query.shape
        kv_heads = kv.keys.shape[2]
        row = _locate(block_table, block_table.tolist(), context, kv.keys.shape[1])
        seen = context if window is None else min(context, length + window - 1)
        keys, values = _by_head(kv.keys.flatten(0, 1)), _by_head(kv.values.flatten(0, 1))
        k, v = _read(kv, keys, values, row, context - seen, seen)
        group = heads // kv_heads
        # (kv_heads, group, t, head_dim): heads of a group read the same keys, unrepeated in memory.
        q = query.reshape(length, kv_heads, group, -1).permute(1, 2, 0, 3)
        k, v = (x[0].unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
        plain = seen == length and (window is None or window >= length)
        if softcap is not None:
            attended = _capped(q, k, v, self._mask(query, seen, window), scale, softcap)
        elif plain:
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mask = self._mask(query, seen, window)
            attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return attended.permute(2, 0, 1, 3).reshape(length, heads, -1)

    def _mask(self, query: torch.Tensor, seen: int, window: int | None) -> torch.Tensor:
        """(t, seen) bool: the last t of `seen` positions, causal, within the window."""
        length = query.shape[0]
        key = (length, seen, window)
        if key not in self._masks:
            at = torch.arange(seen, device=query.device)
            behind = at[seen - length :, None] - at
            mask = behind >= 0
            self._masks[key] = mask if window is None else mask & (behind < window)
        return self._masks[key]


def _locate(table: torch.Tensor, blocks: list[int], context: int, block_size: int) -> _Row:
    used = blocks[: -(-context // block_size)]
    together = all(after == before + 1 for before, after in pairwise(used))
    return _Row(context, used[0] * block_size, None if together else table[: len(used)])


def _by_head(flat: torch.Tensor) -> torch.Tensor:
    """(slots, kv_heads, dim) → (1, kv_heads, slots, dim), a view."""
    return flat.transpose(0, 1).unsqueeze(0)


def _read(
    kv: PagedKV, keys: torch.Tensor, values: torch.Tensor, row: _Row, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `count` positions from `first` on, each (1, kv_heads, count, dim)."""
    if row.blocks is None:
        start = row.first_slot + first
        return keys.narrow(2, start, count), values.narrow(2, start, count)
    gathered = (x.index_select(0, row.blocks).flatten(0, 1) for x in (kv.keys, kv.values))
    k, v = (_by_head(x).narrow(2, first, count) for x in gathered)
    return k, v


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)
