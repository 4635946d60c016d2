"""Text encoders of two layers, sized to the tokenizer they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import transformers
    from transformers import PreTrainedTokenizerBase

HIDDEN_SIZE = 32
LAYERS = 2


def clip_encoder(tokenizer: PreTrainedTokenizerBase, **config) -> transformers.CLIPTextModel:
    from transformers import CLIPTextModel

    return CLIPTextModel(_clip_config(tokenizer, **config))


def projected_clip_encoder(
    tokenizer: PreTrainedTokenizerBase, **config
) -> transformers.CLIPTextModelWithProjection:
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


def t5_encoder(tokenizer: PreTrainedTokenizerBase, **config) -> transformers.T5EncoderModel:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_t5_config(tokenizer) | config))


def umt5_encoder(tokenizer: PreTrainedTokenizerBase) -> transformers.UMT5EncoderModel:
    """T5 with a table of relative positions in every layer instead of the first alone."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**_t5_config(tokenizer)))


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


def bert_encoder(tokenizer: PreTrainedTokenizerBase) -> transformers.BertModel:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.model_max_length,
        )
    )


def gemma2_encoder(tokenizer: PreTrainedTokenizerBase) -> transformers.Gemma2Model:
    from transformers import Gemma2Config, Gemma2Model

    config = _decoder_config(tokenizer) | {"query_pre_attn_scalar": 8, "sliding_window": 64}
    return Gemma2Model(Gemma2Config(**config))


def glm_encoder(tokenizer: PreTrainedTokenizerBase) -> transformers.GlmModel:
    from transformers import GlmConfig, GlmModel

    return GlmModel(GlmConfig(**_decoder_config(tokenizer)))


def llama(tokenizer: PreTrainedTokenizerBase) -> transformers.LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder_config(tokenizer)))


def qwen3_encoder(tokenizer: PreTrainedTokenizerBase) -> transformers.Qwen3Model:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(**_decoder_config(tokenizer)))


def qwen3(tokenizer: PreTrainedTokenizerBase, **config) -> transformers.Qwen3ForCausalLM:
    """With the head tied to the embeddings: one tensor of the two is in the file."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tied = {"tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**_decoder_config(tokenizer) | tied | config))


def _decoder_config(tokenizer: PreTrainedTokenizerBase) -> dict:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }


def qwen25_vl(
    tokenizer: PreTrainedTokenizerBase,
) -> transformers.Qwen2_5_VLForConditionalGeneration:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    token_id = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    text = _decoder_config(tokenizer) | {"rope_parameters": rope}
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
