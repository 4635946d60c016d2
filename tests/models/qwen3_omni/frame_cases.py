"""Attention within a codec frame, for Triton's interpreter (`python -m`) and for a card."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

CASES = ((1, 4, 2, 16, 16, 0), (3, 4, 2, 16, 16, 5), (2, 3, 3, 24, 4, 3), (2, 16, 8, 128, 16, 15))
"""Rows, heads, kv heads, dim, positions, filled."""


def compare(
    rows: int, heads: int, kv_heads: int, dim: int, positions: int, filled: int, device: str
) -> None:
    from omnistage.models.qwen3_omni.triton_frame import attend_one

    torch.manual_seed(filled)
    keys, values = torch.randn(2, rows + 1, kv_heads, positions, dim, device=device)
    query = torch.randn(rows, 1, heads, dim, device=device).transpose(1, 2)
    key, value = torch.randn(2, rows, 1, kv_heads, dim, device=device).transpose(2, 3)
    all_keys, all_values = keys[:rows].clone(), values[:rows].clone()
    all_keys[:, :, filled], all_values[:, :, filled] = key[:, :, 0], value[:, :, 0]
    expected = scaled_dot_product_attention(
        query,
        all_keys[:, :, : filled + 1],
        all_values[:, :, : filled + 1],
        scale=0.3,
        enable_gqa=True,
    ).transpose(1, 2)
    got = attend_one(query, key, value, keys[:rows], values[:rows], filled, 0.3)
    assert expected.abs().max() > 0.1, "the reference is near zero"
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(keys[:rows], all_keys)
    assert torch.equal(values[:rows], all_values)
    assert (got.roll(1, -1) - expected).abs().max() > 1e-3, "the order does not matter"


if __name__ == "__main__":
    for case in CASES:
        compare(*case, "cpu")
    print(f"{len(CASES)} cases agree")
