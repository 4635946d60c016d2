"""Refusals that adapters share."""

from __future__ import annotations

from omnistage.api.protocol.speech import SpeechRequest
from omnistage.api.tts.base import Voices
from omnistage.contracts.errors import InvalidRequestError


def known_voice(voices: Voices, name: str | None) -> str | None:
    """The checkpoint's spelling of a voice that is asked for in any case.

    Raises `InvalidRequestError` that names the known ones.
    """
    if name is None:
        return voices.default
    by_lower_case = {known.lower(): known for known in voices.names}
    if name.lower() not in by_lower_case:
        known = ", ".join(voices.names) or "none: leave voice out"
        raise InvalidRequestError(
            f"voice {name!a} is not known to this model; known: {known}", param="voice"
        )
    return by_lower_case[name.lower()]


def refuse_fields(request: SpeechRequest, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(request, name) is not None:
            raise InvalidRequestError(f"{name}: {reason}; leave it out", param=name)
