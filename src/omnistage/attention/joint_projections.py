"""q, k and v of a stream from one matrix product, by the library's own `fuse_projections`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
"""The fused layer of each stream, and the three that it stands for."""


class FusedProjections:
    """The weights of the three layers become views of the fused one's: no memory is added, and
    whoever calls the three gets what they always gave. `undo` gives them memory of their own."""

    def __init__(self, attentions: Sequence[Any]) -> None:
        self._fused: list[Any] = []
        for attn in attentions:
            if can_fuse_projections(attn):
                self._fuse(attn)

    def __len__(self) -> int:
        return len(self._fused)

    @torch.no_grad()
    def _fuse(self, attn: Any) -> None:
        attn.fuse_projections()
        self._fused.append(attn)
        for fused_name, names in FUSED.items():
            fused = getattr(attn, fused_name)
            fused.requires_grad_(False)
            width = fused.out_features // len(names)
            for index, name in enumerate(names):
                for weight, whole in _pairs(getattr(attn, name), fused):
                    weight.data = whole.data[index * width : (index + 1) * width]

    @torch.no_grad()
    def undo(self) -> None:
        """Idempotent."""
        while self._fused:
            attn = self._fused.pop()
            for fused_name, names in FUSED.items():
                for name in names:
                    for weight, _ in _pairs(getattr(attn, name), getattr(attn, fused_name)):
                        weight.data = weight.data.clone()
                delattr(attn, fused_name)
            attn.fused_projections = False


def can_fuse_projections(attn: Any) -> bool:
    """Plain layers of one shape, with nothing hung on them and nobody else's weights."""
    if getattr(attn, "fused_projections", False) or getattr(attn, "is_cross_attention", True):
        return False
    for names in FUSED.values():
        layers = [getattr(attn, name, None) for name in names]
        if not all(_is_plain(layer) for layer in layers):
            return False
        shapes = {(layer.weight.shape, layer.bias is None, layer.weight.dtype) for layer in layers}
        if len(shapes) != 1:
            return False
    return True


def _is_plain(layer: Any) -> bool:
    hooked = getattr(layer, "_forward_hooks", None) or getattr(layer, "_forward_pre_hooks", None)
    return type(layer) is nn.Linear and not hooked and "forward" not in vars(layer)


def _pairs(layer: nn.Linear, fused: nn.Linear) -> list[tuple[nn.Parameter, nn.Parameter]]:
    pairs = [(layer.weight, fused.weight)]
    return pairs if layer.bias is None else [*pairs, (layer.bias, fused.bias)]
