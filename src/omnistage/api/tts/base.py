"""What a speaking model must say of itself so that `/v1/audio/speech` can serve it.

One file a family, one row in `registry.py`; the route knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from omnistage.api.protocol.speech import SpeechRequest
from omnistage.config.resolved import OmniConfig
from omnistage.contracts.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechJob:
    """A request for speech as the engine takes it: the prompt, one set of parameters a stage, the
    outputs that are wanted ("audio", and "text" where its tokens count)."""

    prompt: dict[str, Any]
    params: list[SamplingParams]
    modalities: tuple[str, ...] = ("audio",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Voices:
    """`names` as the checkpoint spells them; `default` speaks where a request names none."""

    names: tuple[str, ...] = ()
    default: str | None = None


class TTSAdapter(Protocol):
    """Cheap, without state, called on the event loop."""

    def matches(self, config: OmniConfig) -> bool:
        """Whether this deployment is of this family, with the stages that speech needs."""

    def voices(self, config: OmniConfig) -> Voices: ...

    def validate(self, config: OmniConfig, request: SpeechRequest) -> None:
        """Raises `InvalidRequestError` for what this model cannot do, naming the field."""

    def build(self, config: OmniConfig, request: SpeechRequest) -> SpeechJob:
        """Called for a request that `validate` let pass."""
