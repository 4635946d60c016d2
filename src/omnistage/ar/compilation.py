"""Compiled decoder layers: one compiled block serves every layer and every number of tokens.

Attention, linear layers and experts stay operators of their own inside a block; what is compiled is
what lies between them: norms, rotary embeddings, activations, additions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def find_layers(module: nn.Module, count: int) -> list[nn.Module]:
    """The decoder layers: the list of `count` modules each of which holds one attention layer, in
    order of `layer_idx`. Empty when there is no such list."""
    for candidate in module.modules():
        if isinstance(candidate, nn.ModuleList) and len(candidate) == count:
            found = [_attention_index(layer) for layer in candidate]
            if found == list(range(count)):
                return list(candidate)
    return []


def compile_layers(layers: list[nn.Module], **options: Any) -> None:
    """Compile each layer in place when it is first called, by `torch.nn.Module.compile`.

    The second number of tokens that a layer sees leaves code for all further ones; one token has
    code of its own. The gate's probe brings both. `options` are `torch.compile`'s.
    """
    import omnistage.attention.paged_op  # noqa: F401  (defines the operator that blocks call)

    raise_recompile_limit(2 * len(layers))
    for layer in layers:
        layer.compile(fullgraph=True, **options)


def raise_recompile_limit(count: int) -> None:
    """All layers share one code object: layers of several kinds (sliding windows, dense among
    experts) and numbers of tokens each take an entry of its cache."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 16 + count)


def _attention_index(layer: nn.Module) -> int | None:
    """`layer_idx` of the one attention module in `layer`, which is what has key projections."""
    found = {
        module.layer_idx
        for module in layer.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
    }
    return found.pop() if len(found) == 1 else None
