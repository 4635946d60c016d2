"""Text encoders of two layers, sized to the tokenizer they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import (
        CLIPTextModel,
        CLIPTextModelWithProjection,
        PreTrainedTokenizerBase,
        Qwen2_5_VLForConditionalGeneration,
        T5EncoderModel,
    )

HIDDEN_SIZE = 32
LAYERS = 2


def clip_encoder(tokenizer: PreTrainedTokenizerBase, **config) -> CLIPTextModel:
    from transformers import CLIPTextModel

    return CLIPTextModel(_clip_config(tokenizer, **config))


def projected_clip_encoder(
    tokenizer: PreTrainedTokenizerBase, **config
) -> CLIPTextModelWithProjection:
    from transformers import CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(_clip_config(tokenizer, **config))


def _clip_config(tokenizer: PreTrainedTokenizerBase, **config):
    from transformers import CLIPTextConfig

    # The pooled output is taken at the end token, which a configuration with the original's
    # ids (eos_token_id=2) would look for at the largest id instead.
    defaults = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS + 1,  # some pipelines read the last layer but one
        "projection_dim": HIDDEN_SIZE,
        "max_position_embeddings": tokenizer.model_max_length,
    }
    return CLIPTextConfig(**defaults | config)


def t5_encoder(tokenizer: PreTrainedTokenizerBase, **config) -> T5EncoderModel:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_t5_config(tokenizer) | config))


def _t5_config(tokenizer: PreTrainedTokenizerBase) -> dict:
    return {
        "vocab_size": len(tokenizer),
        "d_model": HIDDEN_SIZE,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": LAYERS,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.1,  # as in the real ones: an encoder in training mode must be noticed
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }


def qwen25_vl(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLForConditionalGeneration:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    token_id = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [1, 1, 2],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision,
            vision_start_token_id=token_id("<|vision_start|>"),
            vision_end_token_id=token_id("<|vision_end|>"),
            image_token_id=token_id("<|image_pad|>"),
            video_token_id=token_id("<|video_pad|>"),
        )
    )
