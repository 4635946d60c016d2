"""What a deployment may set as option `model` of the token2wav stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Token2WavOptions:
    """`chunked` for requests that do not say: None, those that stream get chunks and the others one
    pass. A chunk is `chunk_blocks` of the transformer's blocks (12 codes, 0.24 s, in the released
    model) and waits for `lookahead_blocks` more. `vocoder_context_frames` of the spectrogram are
    known on both sides before a frame becomes sound, or as many as the vocoder reaches: 37 in the
    released model, where with random weights 24 leave an error of 4e-6 of the peak, 16 of 2e-3."""

    chunked: bool | None = None
    chunk_blocks: int = 2
    lookahead_blocks: int = 1
    vocoder_context_frames: int = 24


_LEAST = {"chunk_blocks": 1, "lookahead_blocks": 0, "vocoder_context_frames": 0}
_NAMES = (*Token2WavOptions.__dataclass_fields__,)


def read_options(stage: ResolvedStage) -> Token2WavOptions:
    """Raises `ConfigurationError` for an unknown option (naming the nearest) or a wrong value."""
    given: dict[str, Any] = dict(stage.options.get("model", {}))
    for name, value in given.items():
        if name not in _NAMES:
            raise ConfigurationError(f"unknown option model.{name}; {suggestion(name, _NAMES)}")
        if name == "chunked" and type(value) is not bool:
            raise ConfigurationError(f"model.chunked must be true or false, got {value!r}")
        if name != "chunked" and (type(value) is not int or value < _LEAST[name]):
            raise ConfigurationError(
                f"model.{name} must be a whole number of at least {_LEAST[name]}, got {value!r}"
            )
    if not stage.async_chunk:
        given["chunked"] = False
    return Token2WavOptions(**given)
