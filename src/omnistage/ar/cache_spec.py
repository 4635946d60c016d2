"""What one layer keeps of a sequence: the cache spec per layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Keys and values of one attention layer. `window` is the sliding window in tokens, the current
    one included (a query at position p sees p - window + 1 … p); None sees everything before.
    `value_dim` differs from `head_dim` in latent attention (MLA) models."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None

    def token_bytes(self, item_bytes: int) -> int:
        """Bytes that one token takes in this layer."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * item_bytes
