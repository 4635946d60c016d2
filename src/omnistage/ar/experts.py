"""Mixture-of-experts layers through `transformers`' experts interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

import omnistage.ar.device_ops  # noqa: F401  (defines the operator)

NAME = "omnistage_few_tokens"
_SILU = ("SiLUActivation", "SiLU")


def register() -> str:
    """Make `few_token_forward` known to `transformers` as `NAME`. Idempotent."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, few_token_forward)
    return NAME


def use_few_token_experts(module: nn.Module) -> int:
    """Let every experts layer below `module` that the kernel can do run by it. Returns how many."""
    name = register()
    layers = [m for m in module.modules() if _is_supported(m)]
    for layer in layers:
        layer.config._experts_implementation = name  # type: ignore[union-attr]
    return len(layers)


def few_token_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """hidden_states (T, hidden), top_k_index and top_k_weights (T, k) → (T, hidden)."""
    return torch.ops.omnistage.experts(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj
    )


def _is_supported(layer: Any) -> bool:
    """Gated by SiLU, gate and up one after the other in (experts, 2 * inner, hidden), no biases."""
    from transformers.integrations.moe import _default_apply_gate

    if not all(isinstance(getattr(layer, name, None), nn.Parameter) for name in _PARAMETERS):
        return False
    differs = any(getattr(layer, name, False) for name in _DIFFERENCES)
    gated = getattr(layer, "has_gate", True) and getattr(layer, "is_concatenated", True)
    plain_gate = getattr(type(layer), "_apply_gate", None) is _default_apply_gate
    activation = getattr(layer, "act_fn", None)
    is_silu = activation is silu or type(activation).__name__ in _SILU
    return gated and plain_gate and is_silu and not differs and hasattr(layer, "config")


_PARAMETERS = ("gate_up_proj", "down_proj")
_DIFFERENCES = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
