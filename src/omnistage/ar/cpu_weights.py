"""Linear layers on a CPU that multiply by weights packed for oneDNN.

CPU time of one thread for 16 rows, plain / packed (ms; SmolLM2-135M's shapes, ten layers, one
head): float32 gate and up 14.4 / 11.9, head 27.5 / 15.7, the others equal, and for one row slower;
bfloat16 gate and up 8.2 / 7.5, query to value 2.3 / 1.7, head 13.5 / 8.1.
"""

from __future__ import annotations

import torch
from torch import nn

MIN_WEIGHTS = 1 << 16
"""Numbers in a matrix below which a call costs more than its product."""
WIDE = 2
"""In float32 only layers with this many times more outputs than inputs gain."""
ROWS = 16
"""What the packed form is chosen for: tokens of a decode step. It serves any number."""


class PackedLinear(nn.Module):
    """In place of an `nn.Linear`, whose weights it holds in packed form only."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.bias = source.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(source.weight.detach(), ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return result


def pack_linears(module: nn.Module) -> int:
    """Replace what gains by it; returns how many layers. Parts with hooks of their own, subclasses
    and layers on other devices stay."""
    if not torch.backends.mkldnn.is_available():
        return 0
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if _gains(child)
    ]
    with torch.no_grad():
        for parent, name, child in found:
            setattr(parent, name, PackedLinear(child))
    return len(found)


def _gains(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight = layer.weight
    if weight.device.type != "cpu" or weight.numel() < MIN_WEIGHTS:
        return False
    if weight.dtype is torch.float32:
        return layer.out_features >= WIDE * layer.in_features
    return weight.dtype is torch.bfloat16
