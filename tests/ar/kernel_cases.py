"""Kernels for few tokens, for Triton's interpreter (`python -m`) and for a card."""

from __future__ import annotations

import torch

SMALL_EXPERTS = ((1, 6, 2, 48, 40), (5, 6, 2, 48, 40), (40, 6, 2, 48, 40), (3, 4, 1, 32, 160))
"""Tokens, experts, experts a token, hidden, inner."""
SMALL_LINEARS = ((48, 40, False), (130, 96, True))
"""Columns, depth, bias."""


def compare_experts(
    tokens: int, experts: int, top_k: int, hidden: int, inner: int, device: str, dtype: torch.dtype
) -> None:
    from omnistage.ar.triton_experts import few_token_experts

    torch.manual_seed(0)
    x = torch.randn(tokens, hidden)
    gate_up = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(experts, hidden, inner) * inner**-0.5
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    scores = torch.rand(tokens, top_k)
    x, gate_up, down, scores = (t.to(device, dtype) for t in (x, gate_up, down, scores))
    got = few_token_experts(x, chosen.to(device), scores, gate_up, down).double().cpu()
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    x, gate_up, down, scores = (t.double().cpu() for t in (x, gate_up, down, scores))
    for token in range(tokens):
        for place in range(top_k):
            expert = chosen[token, place]
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            part = down[expert] @ (torch.nn.functional.silu(gate) * up)
            expected[token] += part * scores[token, place]
    _close(got, expected, dtype)


def compare_linear(columns: int, depth: int, bias: bool, device: str, dtype: torch.dtype) -> None:
    from omnistage.ar.triton_linear import one_row_linear

    torch.manual_seed(0)
    x, weight = torch.randn(1, depth), torch.randn(columns, depth) * depth**-0.5
    offset = torch.randn(columns) if bias else None
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    offset = None if offset is None else offset.to(device, dtype)
    got = one_row_linear(x, weight, offset).double().cpu()
    plain = None if offset is None else offset.double().cpu()
    expected = torch.nn.functional.linear(x.double().cpu(), weight.double().cpu(), plain)
    _close(got, expected, dtype)


def _close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    assert expected.abs().max() > 0.1, "the reference is near zero"
    assert (got - expected).abs().max() < limit * expected.abs().max().clamp_min(1)
    assert (got.roll(1, -1) - expected).abs().max() > limit, "the order does not matter"


if __name__ == "__main__":
    for case in SMALL_EXPERTS:
        compare_experts(*case, "cpu", torch.float32)
    for linear in SMALL_LINEARS:
        compare_linear(*linear, "cpu", torch.float32)
    print(f"{len(SMALL_EXPERTS) + len(SMALL_LINEARS)} cases agree")
