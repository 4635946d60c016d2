"""The family's positions: `transformers`' own `get_rope_index`, without a model."""

from __future__ import annotations

from copy import copy
from typing import Any

from omnistage.ar.mrope import RopeIndex


def rope_index(config: Any, audio_config: Any, spatial_merge_size: int) -> RopeIndex:
    """`config` is the thinker's or the talker's, the rest that of the thinker's encoders. The
    talker's lacks the sound encoder's window, which positions of sound need."""
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    if getattr(config, "audio_config", None) is None:
        config = copy(config)
        config.audio_config = audio_config
    owner = modeling.Qwen3OmniMoePreTrainedModelForConditionalGeneration
    return RopeIndex(owner, config, spatial_merge_size)
