"""From the talker's outputs to what token2wav decodes, and what a request may ask of that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Executor
from omnistage.contracts.sampling import SamplingParams
from omnistage.contracts.tensors import host_tensor

VOICE, SEED, STREAMED = "voice", "seed", "streamed"
"""Tensors (1,) int64 of the talker's prompt payload: place of the voice in the checkpoint's file,
the talker's seed, 1 where the request takes its output as it comes."""

SPEECH = "speech"
"""Field of token2wav's first input: a `SpeechSettings`."""

MAX_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSettings:
    """Of one waveform. `num_steps`, `guidance_scale` and `sway_coefficient` are those of
    `Qwen2_5OmniToken2WavModel.forward`. `chunked`: sound leaves in chunks, which are close to the
    one-pass decode, as the codes come; False: the one-pass decode itself, at the end; None: the
    stage's choice. `streamed`: the request takes its outputs as they come."""

    voice: int
    seed: int
    streamed: bool
    num_steps: int = 10
    guidance_scale: float = 0.5
    sway_coefficient: float | None = -1.0
    chunked: bool | None = None


def codes_of_tokens(data: StageData, params: SamplingParams, executor: Executor) -> StageData:
    """An `InputAdapter`: token ids are codes (k, 1). Raises `InvalidRequestError` for `extra_args`
    that token2wav does not take."""
    codes = np.asarray(data.fields["token_ids"], dtype=np.int64).reshape(-1, 1)
    fields: dict[str, Any] = {}
    if SEED in data.tensors:
        voice, seed, streamed = (
            int(host_tensor(data.tensors[name]).numpy()[0]) for name in (VOICE, SEED, STREAMED)
        )
        told = SpeechSettings(voice=voice, seed=seed, streamed=bool(streamed))
        fields[SPEECH] = _with_wishes(told, getattr(params, "extra_args", {}))
    return StageData(modality=Modality.TOKENS, fields=fields, tensors={"codes": codes})


def _with_wishes(settings: SpeechSettings, wishes: dict[str, Any]) -> SpeechSettings:
    for name, value in wishes.items():
        if name not in _WISHES:
            raise InvalidRequestError(
                f"token2wav has no option {name!r}; {suggestion(name, _WISHES)}",
                param="extra_args",
            )
        allowed, words = _WISHES[name]
        if not allowed(value):
            raise InvalidRequestError(f"{name} must be {words}, got {value!r}", param=name)
    return replace(settings, **wishes)


def _is_number(value: Any, low: float, high: float) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and low <= value <= high


_WISHES: dict[str, tuple[Any, str]] = {
    "num_steps": (
        lambda value: type(value) is int and 2 <= value <= MAX_STEPS,
        f"a whole number from 2 to {MAX_STEPS}",
    ),
    "guidance_scale": (lambda value: _is_number(value, 0, 100), "a number from 0 to 100"),
    "sway_coefficient": (
        lambda value: value is None or _is_number(value, -10, 10),
        "a number from -10 to 10, or null",
    ),
    "chunked": (lambda value: type(value) is bool, "true or false"),
}
