"""What a text request may want of this model and this server."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.api.protocol.chat_text import AudioOptions
from omnistage.api.settings import ApiSettings
from omnistage.api.text.conversation import Conversation
from omnistage.config.pipeline import ENTRY
from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError
from omnistage.contracts.modalities import Modality


def final_modalities(config: OmniConfig) -> list[str]:
    """What a model answers with, in the order of its stages."""
    made = [str(s.output_modality) for s in config.pipeline.stages if s.final_output]
    return list(dict.fromkeys(made))


def writes_text(config: OmniConfig) -> bool:
    return Modality.TEXT in final_modalities(config)


def check_choices(settings: ApiSettings, count: int) -> None:
    if count > settings.max_choices:
        raise InvalidRequestError(
            f"n: {count} answers are over this server's limit of {settings.max_choices} a request "
            "(max_choices)",
            param="n",
        )


def check_kinds(config: OmniConfig, conversation: Conversation) -> None:
    taken = {str(m) for s in config.pipeline.consumers(ENTRY) for m in s.input_modalities}
    for kind, param in conversation.kinds.items():
        if kind not in taken:
            raise InvalidRequestError(
                f"{param}: this model takes {', '.join(sorted(taken))}, not {kind}", param=param
            )


def check_outputs(
    config: OmniConfig, wanted: Sequence[str] | None, audio: AudioOptions | None
) -> bool:
    """Whether the answer is spoken too. Text alone is the default, as OpenAI's."""
    made = final_modalities(config)
    names = list(wanted or ["text"])
    for name in names:
        if name not in made:
            raise InvalidRequestError(
                f"modalities: this model cannot answer with {name!r}; available: {', '.join(made)}",
                param="modalities",
            )
    if "image" in names:
        raise InvalidRequestError(
            "modalities: 'image' is not offered beside text here", param="modalities"
        )
    if audio is not None and "audio" not in names:
        raise UnsupportedCombinationError(
            'audio needs modalities: ["text", "audio"]', param="audio"
        )
    return "audio" in names
