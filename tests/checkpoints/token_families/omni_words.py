"""Tokenizers, chat templates and processors of the Qwen omni models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tokens import QWEN_SPECIAL_TOKENS, _byte_level_bpe

if TYPE_CHECKING:
    import transformers

MAX_POSITIONS = 4096


def omni_tokenizer(named: dict[str, str], others: tuple[str, ...]) -> transformers.Qwen2Tokenizer:
    """Qwen's, with the media tokens by name (`image_token` …) and further special tokens."""
    from transformers import AddedToken, Qwen2Tokenizer

    vocabulary, merges = _byte_level_bpe()
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        extra_special_tokens=named,
    )
    specials = dict.fromkeys((*QWEN_SPECIAL_TOKENS, *named.values(), *others))
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in specials],
        special_tokens=True,
    )
    tokenizer.chat_template = _chat_template(named)
    return tokenizer


def _chat_template(named: dict[str, str]) -> str:
    """ChatML, each picture, sound and video as one token between its marks."""
    media = "".join(
        f"{{% elif part['type'] == '{kind}' %}}"
        + named[f"{marks}_bos_token"] + named[f"{kind}_token"] + named[f"{marks}_eos_token"]
        for kind, marks in (("image", "vision"), ("audio", "audio"), ("video", "vision"))
    )  # fmt: skip
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}" + media + "{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def omni_processor(cls: type, tokenizer: Any, *, patch_size: int, video_processor: Any) -> Any:
    """Pictures and frames of at most 128 x 128 pixels, sounds as Whisper's features."""
    from transformers import Qwen2VLImageProcessor, WhisperFeatureExtractor

    return cls(
        image_processor=Qwen2VLImageProcessor(
            patch_size=patch_size,
            merge_size=2,
            temporal_patch_size=2,
            min_pixels=32 * 32,
            max_pixels=128 * 128,
        ),
        video_processor=video_processor,
        feature_extractor=WhisperFeatureExtractor(
            feature_size=128,
            sampling_rate=16_000,
            hop_length=160,
            chunk_length=30,
            n_fft=400,
            return_attention_mask=True,
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
