"""Qwen3-Omni: thinker (mixture of experts), talker with code predictor, codec decoder."""

from __future__ import annotations

from .family import token_model
from .omni_words import MAX_POSITIONS, omni_processor, omni_tokenizer

HIDDEN_SIZE = 32
CODEBOOK_SIZE = 64
CODE_GROUPS = 4
SPEAKERS = ("ethan", "chelsie", "aiden")
MEDIA_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
SPEECH_TOKENS = ("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>")


def loud_codec(model, folder):
    """Random codes are no silence; nor are they clipped."""
    import torch

    from .weights import make_loud

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(CODEBOOK_SIZE, (1, CODE_GROUPS, 50), generator=generator)
    with torch.no_grad():
        make_loud(model.code2wav.decoder[-1], _unclipped(model.code2wav, codes))


def _unclipped(code2wav, codes):
    heard = []
    handle = code2wav.decoder[-1].register_forward_hook(lambda *call: heard.append(call[-1]))
    code2wav(codes)
    handle.remove()
    return heard[0]


@token_model("Qwen3OmniMoeForConditionalGeneration", finish=loud_codec)
def qwen3_omni():
    """Sounds are 24 kHz, 1920 samples a codec frame as in the real one: 8·5·4·3·2·2."""
    from transformers import (
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeConfig,
        Qwen3OmniMoeForConditionalGeneration,
        Qwen3OmniMoeProcessor,
    )

    tokenizer = omni_tokenizer(MEDIA_TOKENS, SPEECH_TOKENS)
    config = Qwen3OmniMoeConfig(
        thinker_config=_thinker(tokenizer),
        talker_config=_talker(tokenizer),
        code2wav_config=_code2wav(),
        enable_audio_output=True,
        im_start_token_id=_id(tokenizer, "<|im_start|>"),
        im_end_token_id=_id(tokenizer, "<|im_end|>"),
        tts_pad_token_id=_id(tokenizer, "<tts_pad>"),
        tts_bos_token_id=_id(tokenizer, "<tts_text_bos>"),
        tts_eos_token_id=_id(tokenizer, "<tts_text_eod>"),
        system_token_id=_id(tokenizer, "system"),
        user_token_id=_id(tokenizer, "user"),
        assistant_token_id=_id(tokenizer, "assistant"),
    )
    processor = omni_processor(
        Qwen3OmniMoeProcessor,
        tokenizer,
        patch_size=16,
        video_processor=Qwen2VLVideoProcessor(
            patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1024, max_pixels=16_384
        ),
    )
    return Qwen3OmniMoeForConditionalGeneration(config), processor


def _id(tokenizer, text):
    (found,) = tokenizer(text).input_ids
    return found


def _media_ids(tokenizer):
    return {
        "audio_token_id": _id(tokenizer, "<|audio_pad|>"),
        "image_token_id": _id(tokenizer, "<|image_pad|>"),
        "video_token_id": _id(tokenizer, "<|video_pad|>"),
        "audio_start_token_id": _id(tokenizer, "<|audio_start|>"),
        "vision_start_token_id": _id(tokenizer, "<|vision_start|>"),
        "position_id_per_seconds": 13,
    }


def _decoder(vocab_size, layers):
    rope = {
        "mrope_section": [2, 1, 1],
        "rope_type": "default",
        "rope_theta": 1e6,
        "interleaved": True,
        "mrope_interleaved": True,
    }
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": rope,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


def _thinker(tokenizer):
    audio = {
        "d_model": 32,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "encoder_layers": 2,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
        "downsample_hidden_size": 8,
        "n_window": 50,
        "n_window_infer": 800,
        "output_dim": HIDDEN_SIZE,
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    return _media_ids(tokenizer) | {
        "audio_config": audio,
        "vision_config": vision,
        "text_config": _decoder(len(tokenizer), layers=4),
        "audio_end_token_id": _id(tokenizer, "<|audio_end|>"),
        "vision_end_token_id": _id(tokenizer, "<|vision_end|>"),
        "user_token_id": _id(tokenizer, "user"),
        "seconds_per_chunk": 2,
    }


def _talker(tokenizer):
    predictor = {
        "vocab_size": CODEBOOK_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_code_groups": CODE_GROUPS,
        "max_position_embeddings": 1024,
    }
    text = _decoder(1024 + CODEBOOK_SIZE, layers=3) | {"shared_expert_intermediate_size": 32}
    return _media_ids(tokenizer) | {
        "text_config": text,
        "code_predictor_config": predictor,
        "num_code_groups": CODE_GROUPS,
        "thinker_hidden_size": HIDDEN_SIZE,
        "accept_hidden_layer": 2,
        "spatial_merge_size": 2,
        "codec_pad_id": CODEBOOK_SIZE + 4,
        "codec_bos_id": CODEBOOK_SIZE + 5,
        "codec_eos_token_id": CODEBOOK_SIZE + 6,
        "codec_nothink_id": CODEBOOK_SIZE + 11,
        "codec_think_bos_id": CODEBOOK_SIZE + 12,
        "codec_think_eos_id": CODEBOOK_SIZE + 13,
        "speaker_id": {name: CODEBOOK_SIZE + 20 + i for i, name in enumerate(SPEAKERS)},
    }


def _code2wav():
    return {
        "codebook_size": CODEBOOK_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": 72,
        "max_position_embeddings": 8000,
        "num_quantizers": CODE_GROUPS,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "decoder_dim": 64,
    }
