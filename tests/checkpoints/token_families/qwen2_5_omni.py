"""Qwen2.5-Omni: thinker, talker, and token2wav (a diffusion transformer and a BigVGAN vocoder)."""

from __future__ import annotations

from .family import token_model
from .omni_words import MAX_POSITIONS, omni_processor, omni_tokenizer

HIDDEN_SIZE = 32
CODEBOOK_SIZE = 128
TALKER_VOCABULARY = CODEBOOK_SIZE + 16
MEL_BINS = 80
SPEAKER_SIZE = 16
MEDIA_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
SPEAKERS = {"Chelsie": "<|spk_chelsie|>", "Ethan": "<|spk_ethan|>"}
SPEECH_TOKENS = ("<|tts_pad|>", "<|tts_start|>", "<|tts_end|>", *SPEAKERS.values())


def loud_vocoder_and_speakers(model, folder):
    """The vocoder is loud for a spectrogram of noise; voices lie in a file of their own, in
    the real one's format."""
    import torch

    from .weights import make_loud

    generator = torch.Generator().manual_seed(0)
    vocoder = model.token2wav.code2wav_bigvgan_model
    with torch.no_grad():
        mel = torch.randn(1, MEL_BINS, 50, generator=generator)
        make_loud(vocoder.conv_post, _unclipped(vocoder, mel))
    first = model.config.thinker_config.text_config.vocab_size - len(SPEAKERS)
    voices = {
        name: {
            "cond": torch.randn(1, SPEAKER_SIZE, generator=generator),
            "ref_mel": torch.randn(1, 30, MEL_BINS, generator=generator),
            "bos_token": first + place,  # the tokenizer's last are the speakers'
        }
        for place, name in enumerate(SPEAKERS)
    }
    torch.save(voices, folder / "spk_dict.pt")


def _unclipped(vocoder, mel):
    heard = []
    handle = vocoder.conv_post.register_forward_hook(lambda *call: heard.append(call[-1]))
    vocoder(mel)
    handle.remove()
    return heard[0]


@token_model(
    "Qwen2_5OmniForConditionalGeneration",
    name="qwen2.5-omni",
    finish=loud_vocoder_and_speakers,
)
def qwen2_5_omni():
    """Sounds are 24 kHz, 480 samples a codec frame of two mel frames: 5·3·2·2·2·2."""
    from transformers import (
        Qwen2_5OmniConfig,
        Qwen2_5OmniForConditionalGeneration,
        Qwen2_5OmniProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = omni_tokenizer(MEDIA_TOKENS, SPEECH_TOKENS)
    config = Qwen2_5OmniConfig(
        thinker_config=_thinker(tokenizer),
        talker_config=_talker(tokenizer),
        token2wav_config=_token2wav(),
        enable_audio_output=True,
    )
    processor = omni_processor(
        Qwen2_5OmniProcessor,
        tokenizer,
        patch_size=14,
        video_processor=Qwen2VLVideoProcessor(
            patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=1024, max_pixels=16_384
        ),
    )
    return Qwen2_5OmniForConditionalGeneration(config), processor


def _id(tokenizer, text):
    (found,) = tokenizer(text).input_ids
    return found


def _media_ids(tokenizer):
    names = {
        "audio_token_index": "<|AUDIO|>",
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
    }
    return {name: _id(tokenizer, text) for name, text in names.items()}


def _decoder(vocab_size, pad_token_id):
    rope = {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 1e6}
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": rope,
        "pad_token_id": pad_token_id,
    }


def _thinker(tokenizer):
    audio = {
        "d_model": 32,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "encoder_layers": 2,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
        "n_window": 100,
        "output_dim": HIDDEN_SIZE,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "out_hidden_size": HIDDEN_SIZE,
        "fullatt_block_indexes": [1],
    }
    text = _decoder(len(tokenizer), tokenizer.pad_token_id) | {"tie_word_embeddings": False}
    return _media_ids(tokenizer) | {
        "audio_config": audio,
        "vision_config": vision,
        "text_config": text,
        "user_token_id": _id(tokenizer, "user"),
    }


def _talker(tokenizer):
    return (
        _media_ids(tokenizer)
        | _decoder(TALKER_VOCABULARY, CODEBOOK_SIZE)
        | {
            "head_dim": 8,
            "embedding_size": HIDDEN_SIZE,
            "tts_text_start_token_id": _id(tokenizer, "<|tts_start|>"),
            "tts_text_end_token_id": _id(tokenizer, "<|tts_end|>"),
            "tts_text_pad_token_id": _id(tokenizer, "<|tts_pad|>"),
            "tts_codec_pad_token_id": CODEBOOK_SIZE,
            "tts_codec_start_token_id": CODEBOOK_SIZE + 1,
            "tts_codec_end_token_id": CODEBOOK_SIZE + 2,
            "tts_codec_mask_token_id": CODEBOOK_SIZE + 4,
        }
    )


def _token2wav():
    transformer = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "ff_mult": 2,
        "emb_dim": 16,
        "block_size": 24,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 2],
        "repeats": 2,
        "num_embeds": TALKER_VOCABULARY,
        "mel_dim": MEL_BINS,
        "dropout": 0.1,
        "enc_emb_dim": SPEAKER_SIZE,
        "enc_dim": 16,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
    }
    vocoder = {
        "mel_dim": MEL_BINS,
        "upsample_initial_channel": 64,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
    }
    return {"dit_config": transformer, "bigvgan_config": vocoder}
