"""Paged attention as one operator, which a compiled block calls without looking inside.

Imported only where blocks are compiled: the definition is torch's, for the process.
"""

from __future__ import annotations

import torch

from omnistage.attention.paged import attend_next_layer

_LIBRARY = torch.library.Library("omnistage", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, float scale, int window, "
    "float softcap) -> Tensor"
)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """The next layer of the step that this thread runs: query (1, heads, T, head_dim) → (1, T,
    heads, value_dim). `window` and `softcap` 0 mean none. Layers come in order, each once: the gate
    at load has seen to that."""
    return attend_next_layer(query, key, value, scale, window or None, softcap or None)


def _attention_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("paged_attention", paged_attention, _device)
torch.library.register_fake("omnistage::paged_attention", _attention_shape, lib=_LIBRARY)
