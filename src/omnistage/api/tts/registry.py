"""Which adapter speaks for which model: the first that matches."""

from __future__ import annotations

from omnistage.api.tts.base import TTSAdapter
from omnistage.api.tts.qwen_omni import QwenOmniSpeech
from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import InvalidRequestError

ADAPTERS: tuple[TTSAdapter, ...] = (QwenOmniSpeech(),)


def adapter_for(config: OmniConfig, adapters: tuple[TTSAdapter, ...] = ADAPTERS) -> TTSAdapter:
    """Raises `InvalidRequestError` for a model that does not speak."""
    for adapter in adapters:
        if adapter.matches(config):
            return adapter
    made = {s.output_modality for s in config.pipeline.stages if s.final_output}
    raise InvalidRequestError(
        f"model {config.served_model_name!r} makes {', '.join(sorted(made))}; it does not speak "
        "texts. Serve a model with speech output",
        param="model",
    )
