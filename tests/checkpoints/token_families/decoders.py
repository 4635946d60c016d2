"""Language models of two to four layers, sized to the tokenizer they are given."""

from __future__ import annotations

from ..tokens import gemma_tokenizer, llama_tokenizer, qwen2_tokenizer
from .family import token_model

HIDDEN_SIZE = 64
MAX_POSITIONS = 2048
WINDOW = 16

LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('only system, user and assistant speak here') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""As those of Llama and Mistral: it writes the token that begins a text, takes content as text
only, and refuses roles."""

GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ 'user' if message['role'] == 'user' else 'assistant' }}\n{{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)


def config(tokenizer, **changes):
    """What most decoders' configurations call the same."""
    values = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
    }
    return values | changes


def _llama_words():
    tokenizer = llama_tokenizer(MAX_POSITIONS)
    tokenizer.add_bos_token = True
    tokenizer.chat_template = LLAMA_CHAT
    return tokenizer


@token_model("Qwen3ForCausalLM")
def qwen3():
    """With the head tied to the embeddings: one tensor of the two is in the file."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from .weights import loud_for_a_tied_head

    tokenizer = qwen2_tokenizer(MAX_POSITIONS)
    model = Qwen3ForCausalLM(Qwen3Config(**config(tokenizer, tie_word_embeddings=True)))
    loud_for_a_tied_head(model.model.norm)
    return model, tokenizer


@token_model("Qwen3MoeForCausalLM")
def qwen3_moe():
    """Experts are stored one by one and fused when loaded; the second layer has none."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = qwen2_tokenizer(MAX_POSITIONS)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config(tokenizer, **experts))), tokenizer


@token_model("LlamaForCausalLM")
def llama():
    """Its tokenizer begins a text with `<s>`, and so does its chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _llama_words()
    return LlamaForCausalLM(LlamaConfig(**config(tokenizer))), tokenizer


@token_model("LlamaForCausalLM")
def smollm2():
    """Llama's class with byte-level words and a tied head: what `gguf_files.py` packs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from .weights import loud_for_a_tied_head

    tokenizer = qwen2_tokenizer(MAX_POSITIONS)
    model = LlamaForCausalLM(LlamaConfig(**config(tokenizer, tie_word_embeddings=True)))
    loud_for_a_tied_head(model.model.norm)
    return model, tokenizer


@token_model("MistralForCausalLM")
def mistral():
    """Every layer sees a window of 16 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer = _llama_words()
    settings = MistralConfig(**config(tokenizer, sliding_window=WINDOW))
    return MistralForCausalLM(settings), tokenizer


@token_model("Gemma3ForCausalLM")
def gemma3():
    """Windows in two layers of three, each kind of layer with a rotary base of its own; tied."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from .weights import enlarge, loud_for_a_tied_head

    tokenizer = gemma_tokenizer(MAX_POSITIONS)
    tokenizer.chat_template = GEMMA_CHAT
    gemma = {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    model = Gemma3ForCausalLM(Gemma3TextConfig(**config(tokenizer, **gemma)))
    loud_for_a_tied_head(model.model.norm)
    for layer in model.model.layers:  # which normalize what they add to embeddings times 8
        enlarge(layer.self_attn.q_norm)
        enlarge(layer.post_attention_layernorm)
        enlarge(layer.post_feedforward_layernorm)
    return model, tokenizer


@token_model("PhiForCausalLM")
def phi():
    """Attention and feed-forward side by side, biases everywhere, half of each head rotated."""
    from transformers import PhiConfig, PhiForCausalLM

    tokenizer = _llama_words()
    changes = {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}
    return PhiForCausalLM(PhiConfig(**config(tokenizer, **changes))), tokenizer


@token_model("Phi3ForCausalLM")
def phi3():
    """Its query, key and value projections are one, its gate and up projections another."""
    from transformers import Phi3Config, Phi3ForCausalLM

    tokenizer = _llama_words()
    return Phi3ForCausalLM(Phi3Config(**config(tokenizer, sliding_window=None))), tokenizer
