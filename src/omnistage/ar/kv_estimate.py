"""What a model keeps of a token, from its configuration alone: for plans, before anything is built.

What is served is measured: `observe_layers` (`gate.py`).
"""

from __future__ import annotations

from typing import Any

from omnistage.contracts.tensors import ITEM_BYTES


def kv_bytes_per_token(config: Any, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers, as `dtype`. `config` is that of a
    `transformers` model, whole or its decoder's."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_dim = getattr(text, "qk_head_dim", None) or head_dim
    value_dim = getattr(text, "v_head_dim", None) or head_dim
    layers: int = text.num_hidden_layers
    return layers * heads * (key_dim + value_dim) * ITEM_BYTES[dtype]
