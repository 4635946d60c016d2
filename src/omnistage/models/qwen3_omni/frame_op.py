"""Frame attention as one operator, which a compiled block calls without looking inside.

Imported only where blocks are compiled: the definition is torch's, for the process.
"""

from __future__ import annotations

import torch

from omnistage.models.qwen3_omni.frame_cache import attend_next_layer

_LIBRARY = torch.library.Library("omnistage", "FRAGMENT")
_LIBRARY.define("frame_attention(Tensor query, Tensor key, Tensor value, float scale) -> Tensor")


def frame_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `omnistage.models.qwen3_omni.frame_cache.frame_attention`."""
    return attend_next_layer(query, key, value, scale)


def _shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    batch, heads, count, dim = query.shape
    return query.new_empty(batch, count, heads, dim)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("frame_attention", frame_attention, _device)
torch.library.register_fake("omnistage::frame_attention", _shape, lib=_LIBRARY)
