"""Operators that a compiled block calls without looking inside, with kernels for few tokens.

They look at the number of tokens when they run, so that one compiled block serves all numbers.
Imported only where a model is prepared for a GPU: the definitions are torch's, for the process.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

MOST_EXPERT_TOKENS = 256
"""Up to here reading each chosen expert once wins; beyond, `transformers`' grouped products do."""


_LIBRARY = torch.library.Library("omnistage", "FRAGMENT")
"""Plain definitions: `torch.library.custom_op` adds checks of its own to every call."""
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define(
    "experts(Tensor x, Tensor experts, Tensor scores, Tensor gate_up, Tensor down) -> Tensor"
)


def few_row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`torch.nn.functional.linear`; one token is multiplied by a kernel of our own."""
    if x.numel() == x.shape[-1] and x.is_cuda and weight.is_contiguous():
        from omnistage.ar.triton_linear import one_row_linear

        return one_row_linear(x.reshape(1, -1), weight, bias).view(*x.shape[:-1], -1)
    return linear(x, weight, bias)


def _linear_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def few_token_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The sum over a token's experts of `down(silu(gate(x)) * up(x)) * score`: x (T, hidden),
    experts and scores (T, k), gate_up (E, 2 * inner, hidden), down (E, hidden, inner) → (T, hidden)
    """
    if not x.is_cuda:
        return _experts_in_torch(x, experts, scores, gate_up, down)
    from omnistage.ar import triton_experts

    if x.shape[0] > MOST_EXPERT_TOKENS:
        return triton_experts.grouped_experts(x, experts, scores, gate_up, down)
    return triton_experts.few_token_experts(x, experts, scores, gate_up, down)


def _experts_shape(
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(x)


def _experts_in_torch(
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Where there is no kernel, for small models only: gathers the weights of each pair."""
    gate, up = torch.einsum("tkih,th->tki", gate_up[experts], x).chunk(2, dim=-1)
    out = torch.einsum("tkhi,tki->tkh", down[experts], silu(gate) * up)
    return (out * scores.unsqueeze(-1)).sum(1)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("linear", few_row_linear, _device)
    _LIBRARY.impl("experts", few_token_experts, _device)
torch.library.register_fake("omnistage::linear", _linear_shape, lib=_LIBRARY)
torch.library.register_fake("omnistage::experts", _experts_shape, lib=_LIBRARY)
