"""Models whose layers do what the attention interface does not carry: to be served correctly or
refused, never served wrong."""

from __future__ import annotations

from ..tokens import qwen2_tokenizer
from .decoders import HIDDEN_SIZE, MAX_POSITIONS, WINDOW, config
from .family import token_model


@token_model("BloomForCausalLM", gate=True)
def bloom():
    """Never calls the interface: it adds ALiBi to scores that it computes itself."""
    from transformers import BloomConfig, BloomForCausalLM

    from .weights import loud_for_a_tied_head

    tokenizer = qwen2_tokenizer(MAX_POSITIONS)
    settings = BloomConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BloomForCausalLM(settings)
    loud_for_a_tied_head(model.transformer.ln_f)
    return model, tokenizer


@token_model("GptOssForCausalLM", gate=True)
def gpt_oss():
    """Hands its attention sinks to the interface as `s_aux`."""
    from transformers import GptOssConfig, GptOssForCausalLM

    tokenizer = qwen2_tokenizer(MAX_POSITIONS)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    return GptOssForCausalLM(GptOssConfig(**config(tokenizer, **experts, **layers))), tokenizer


@token_model("Qwen3NextForCausalLM", gate=True)
def qwen3_next():
    """Three layers of four keep a recurrent state, which packed sequences would share."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    tokenizer = qwen2_tokenizer(MAX_POSITIONS)
    changes = {
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**config(tokenizer, **changes))), tokenizer


@token_model("Lfm2ForCausalLM", gate=True)
def lfm2():
    """Short convolutions between attention layers, which packed sequences would share."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    tokenizer = qwen2_tokenizer(MAX_POSITIONS)
    changes = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    return Lfm2ForCausalLM(Lfm2Config(**config(tokenizer, **changes))), tokenizer
