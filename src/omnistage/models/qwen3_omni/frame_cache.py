"""Attention inside one codec frame: a handful of positions a row, in a small static cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAME = "omnistage_code_frame"


@dataclass(slots=True, eq=False)
class FrameCache:
    """keys and values (layers, rows, kv_heads, positions, head_dim); the first `length` positions
    are filled. `next_layer` counts calls from blocks that are compiled."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0
    next_layer: int = 0


_current: ContextVar[FrameCache | None] = ContextVar("code_frame", default=None)


@contextmanager
def inside(frame: FrameCache) -> Iterator[None]:
    """Layers called inside attend within `frame`, in this thread."""
    frame.next_layer = 0
    token = _current.set(frame)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> str:
    """Make `frame_attention` known to `transformers` as `NAME`. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, frame_attention)
    return NAME


def frame_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (B, heads, t, head_dim), key and value (B, kv_heads, t, head_dim): the next t positions
    of B frames → ((B, t, heads, head_dim), None). More than one position only at a frame's start.
    """
    import torch

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.omnistage.frame_attention(query, key, value, scale), None
    return _attend(_frame(), module.layer_idx, query, key, value, scale), None


def attend_next_layer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same for a compiled block, which must not know which layer it is. Layers come in order,
    each once."""
    frame = _frame()
    frame.next_layer += 1
    return _attend(frame, frame.next_layer - 1, query, key, value, scale)


def _frame() -> FrameCache:
    frame = _current.get()
    if frame is None:
        raise RuntimeError("frame attention was called outside of a frame (see `inside`)")
    return frame


def _attend(
    frame: FrameCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    from torch.nn.functional import scaled_dot_product_attention

    batch, _, count, _ = query.shape
    keys, values = frame.keys[layer, :batch], frame.values[layer, :batch]
    if query.is_cuda and count == 1:
        from omnistage.models.qwen3_omni.triton_frame import attend_one

        return attend_one(query, key, value, keys, values, frame.length, scale)
    end = frame.length + count
    keys[:, :, frame.length : end] = key
    values[:, :, frame.length : end] = value
    attended = scaled_dot_product_attention(
        query,
        keys[:, :, :end],
        values[:, :, :end],
        is_causal=count > 1,
        scale=scale,
        enable_gqa=True,
    )
    return attended.transpose(1, 2).contiguous()
