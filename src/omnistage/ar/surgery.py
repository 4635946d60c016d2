"""What is done to a model's decoder layers before it serves on a GPU.

The gate at load runs its probe after this, so it is also held against the unmodified module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from omnistage.ar.compilation import compile_layers, find_layers
from omnistage.ar.experts import use_few_token_experts
from omnistage.ar.fusion import fuse_projections, replace_linears
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    from omnistage.ar.model import TokenModel

logger = get_logger(__name__)


def fuse_for_gpu(model: TokenModel) -> dict[str, Any]:
    """Join projections, take kernels for few tokens, compile the decoder layers, in place.

    Layers are compiled at their first calls, in the gate's probe. A model with more that runs in
    every step does the same to it by a method `fuse_for_gpu`. Returns what was done, for logs.
    """
    import omnistage.ar.device_ops  # noqa: F401  (defines the operators)

    module = model.module
    experts = use_few_token_experts(module)
    layers = find_layers(module, len(model.layers))
    joined = sum(fuse_projections(layer, torch.ops.omnistage.linear) for layer in layers)
    for layer in layers:
        replace_linears(layer, torch.ops.omnistage.linear)
    compile_layers(layers)
    if not layers:
        logger.warning("%s has no list of decoder layers to compile", type(module).__name__)
    own = getattr(model, "fuse_for_gpu", dict)
    return {
        "joined_projections": joined,
        "few_token_experts": experts,
        "compiled_layers": len(layers),
        **own(),
    }
