"""How the installed `transformers` opens speech, asked of it.

`Qwen2_5OmniTalkerForConditionalGeneration.forward` adds the codec tokens that open speech, and
computes positions in three dimensions, only where it is handed an attention mask. `generate` of
newer versions drops a mask without padding: then speech begins without those tokens, at plain
positions, while the same prompt with padding, or in a batch of several lengths, has them.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def opens_speech_of_unpadded_prompts() -> bool:
    """Whether `generate` of one prompt has the codec tokens that open speech, seen on a talker of a
    few weights. Takes milliseconds and leaves the random state as it was."""
    import torch
    from transformers import (
        Qwen2_5OmniTalkerConfig,
        Qwen2_5OmniTalkerForConditionalGeneration,
    )

    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        talker = Qwen2_5OmniTalkerForConditionalGeneration(Qwen2_5OmniTalkerConfig(**_SMALL)).eval()
        masks: list[Any] = []
        talker.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")),
            with_kwargs=True,
        )
        ids = torch.zeros(1, 3, dtype=torch.int64)
        talker.generate(
            input_ids=ids,
            input_text_ids=ids,
            thinker_reply_part=torch.zeros(1, 2, _SMALL["embedding_size"]),
            inputs_embeds=torch.zeros(1, 3, _SMALL["embedding_size"]),
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            eos_token_id=7,
            pad_token_id=7,
        )
    return masks[0] is not None


_SMALL: dict[str, Any] = {
    "vocab_size": 8,
    "embedding_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 1e4},
    "pad_token_id": 0,
    "tts_text_start_token_id": 1,
    "tts_text_end_token_id": 2,
    "tts_text_pad_token_id": 3,
    "tts_codec_start_token_id": 4,
    "tts_codec_end_token_id": 5,
    "tts_codec_pad_token_id": 6,
    "tts_codec_mask_token_id": 7,
}
