"""Linear layers on a CPU that multiply by weights packed for oneDNN.

CPU time of one thread for 16 rows, plain / packed (ms; SmolLM2-135M's shapes, ten layers, one
head): float32 gate and up 14.4 / 11.9, head 27.5 / 15.7, the others equal, and for one row slower;
bfloat16 gate and up 8.2 / 7.5, query to value 2.3 / 1.7, head 13.5 / 8.1. One product for gate and
up takes three quarters of the time of two, one for query, key and value nine tenths of three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnistage.ar.compilation import find_layers
from omnistage.ar.fusion import LeadingLinear, fuse_projections

if TYPE_CHECKING:
    from omnistage.ar.model import TokenModel

MIN_WEIGHTS = 1 << 16
"""Numbers in a matrix below which a call costs more than its product."""
WIDE = 2
"""In float32 only layers with this many times more outputs than inputs gain."""
ROWS = 16
"""What the packed form is chosen for: tokens of a decode step. It serves any number."""


class PackedLinear(nn.Module):
    """In place of a linear layer, whose weights it holds in packed form only."""

    def __init__(self, source: nn.Linear | LeadingLinear) -> None:
        super().__init__()
        self.out_features, self.in_features = source.weight.shape
        self.bias = source.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(source.weight.detach(), ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return result


def join_and_pack(model: TokenModel) -> dict[str, Any]:
    """Join the projections of the decoder layers, then pack, in place; says how many."""
    layers = find_layers(model.module, len(model.layers))
    joined = sum(fuse_projections(layer) for layer in layers)
    packed = pack_linears(model.module) + sum(map(pack_leaders, layers))
    return {"joined_projections": joined, "packed_layers": packed}


def pack_leaders(module: nn.Module) -> int:
    """The same for joined projections, which stay what they are."""
    leaders = [part for part in module.modules() if isinstance(part, LeadingLinear)]
    gaining = [leader for leader in leaders if _weight_gains(leader.weight)]
    with torch.no_grad():
        for leader in gaining:
            leader.multiply_by(PackedLinear(leader))
    return len(gaining)


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
    return _weight_gains(layer.weight)


def _weight_gains(weight: torch.Tensor) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.device.type != "cpu" or weight.numel() < MIN_WEIGHTS:
        return False
    if weight.dtype is torch.float32:
        return weight.shape[0] >= WIDE * weight.shape[1]
    return weight.dtype is torch.bfloat16
