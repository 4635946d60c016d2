"""Frame attention as one operator, which a compiled block calls without looking inside.

Imported only where blocks are compiled: the definition is torch's, for the process.
"""

from __future__ import annotations

import torch

from omnistage.models.qwen3_omni.frame_cache import attend_next_layer


@torch.library.custom_op("omnistage::frame_attention", mutates_args=())
def frame_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `omnistage.models.qwen3_omni.frame_cache.frame_attention`."""
    return attend_next_layer(query, key, value, scale)


@frame_attention.register_fake
def _shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    batch, heads, count, dim = query.shape
    return query.new_empty(batch, count, heads, dim)
