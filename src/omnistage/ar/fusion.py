"""Module surgery for speed that keeps the mathematics: adjacent projections become one product.

`q_proj`, `k_proj`, `v_proj` of an attention layer, and `gate_proj`, `up_proj` of an MLP, take the
same input one after another. Their weights are joined; the first one called multiplies by all of
them, the others hand out their part. The modules that call them stay as the library wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""In the order in which `transformers` modules call them; a probe checks that they do."""


class PlainLinear(nn.Module):
    """A linear layer that multiplies by `product`."""

    def __init__(self, source: nn.Linear, product: Linear) -> None:
        super().__init__()
        self.weight = source.weight
        self.bias = source.bias
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias)


class LeadingLinear(nn.Module):
    """The first of some siblings: holds the joined weights, and what the others will hand out."""

    def __init__(self, siblings: Sequence[nn.Linear], product: Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.cat([sibling.weight for sibling in siblings]), requires_grad=False
        )
        biases = [sibling.bias for sibling in siblings]
        joined = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
        self.bias = None if joined is None else nn.Parameter(joined, requires_grad=False)
        self._sizes = [sibling.weight.shape[0] for sibling in siblings]
        self._product = product
        self._rest: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self._product(x, self.weight, self.bias).split(self._sizes, -1)
        self._rest = rest
        return first

    def multiply_by(self, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """From now on `product` holds the weights, in a form of its own."""
        self._product = lambda x, weight, bias: product(x)
        self.weight = self.bias = None

    def next_part(self) -> torch.Tensor:
        if self._rest is None:
            raise RuntimeError("a projection was called before the one that leads it")
        part, *rest = self._rest
        self._rest = rest or None
        return part


class FollowingLinear(nn.Module):
    """A sibling whose product its leader has computed."""

    def __init__(self, leader: LeadingLinear) -> None:
        super().__init__()
        self._leader = [leader]  # In a list: no submodule, the leader is its siblings' already.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._leader[0].next_part()


def fuse_projections(module: nn.Module, product: Linear = nn.functional.linear) -> int:
    """Join the siblings of every submodule, in place, and give each joined product to `product`.

    Returns how many groups were joined. A group with a sibling missing, of another class than
    `nn.Linear`, with weights that are shared with another module, or with biases in part only,
    stays as it is.
    """
    shared = _shared_weights(module)
    joined = 0
    for parent in list(module.modules()):
        for names in SIBLINGS:
            siblings = [getattr(parent, name, None) for name in names]
            if _can_join(siblings, shared):
                leader = LeadingLinear(siblings, product)  # type: ignore[arg-type]
                setattr(parent, names[0], leader)
                for name in names[1:]:
                    setattr(parent, name, FollowingLinear(leader))
                joined += 1
    return joined


def replace_linears(module: nn.Module, product: Linear) -> int:
    """Let every other linear layer below `module` multiply by `product`. Returns how many."""
    replaced = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PlainLinear(child, product))
                replaced += 1
    return replaced


def _can_join(siblings: Sequence[Any], shared: set[int]) -> bool:
    if not all(type(sibling) is nn.Linear for sibling in siblings):
        return False
    weights = [sibling.weight for sibling in siblings]
    biases = [sibling.bias is not None for sibling in siblings]
    return (
        len({(w.dtype, w.device, w.shape[1]) for w in weights}) == 1
        and len(set(biases)) == 1
        and not any(id(w) in shared for w in weights)
    )


def _shared_weights(module: nn.Module) -> set[int]:
    """Parameters that more than one module holds."""
    seen: set[int] = set()
    shared: set[int] = set()
    for submodule in module.modules():
        for parameter in submodule.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
