"""Qwen-Omni models (Qwen2.5-Omni, Qwen3-Omni): a chat that asks to read the text aloud.

The thinker writes the text again, the talker speaks it as it comes. Voices are the checkpoint's
(`speaker_id` of the talker's configuration): the pipeline hands them over in the talker's option
`model`, as `voices` and `default_voice`; the chosen one goes to it as `extra_args["voice"]`.
"""

from __future__ import annotations

from typing import Any

from omnistage.api.protocol.speech import SpeechRequest
from omnistage.api.tts.base import SpeechJob, Voices
from omnistage.api.tts.checks import known_voice, refuse_fields
from omnistage.config.pipeline import ExecutionType
from omnistage.config.resolve import PARAMS_BY_EXECUTION
from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.sampling import OmniTokenSamplingParams, SamplingParams

MODEL_TYPES = frozenset({"qwen2_5_omni", "qwen3_omni", "qwen3_omni_moe"})
PRESET_VOICES_TASK = "CustomVoice"
"""The task type of models that speak in voices of their own; the others clone or design them."""

_PERSONA = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech."
)
"""The system prompt that these checkpoints were trained to speak with, from their model cards."""
_TASK = (
    "Read aloud exactly the text that the user sends. Say every word of it and nothing else: no "
    "answer, no comment, no translation."
)
_SPARE_TOKENS = 64
_TOKENS_PER_CHAR = 2


class QwenOmniSpeech:
    """See `TTSAdapter`."""

    def matches(self, config: OmniConfig) -> bool:
        speaks = any(
            stage.final_output and stage.output_modality is Modality.AUDIO
            for stage in config.pipeline.stages
        )
        return config.pipeline.model_type in MODEL_TYPES and speaks

    def voices(self, config: OmniConfig) -> Voices:
        for stage in config.stages:
            options = {**config.pipeline.options.get(stage.stage_id, {}), **stage.options}
            own = options.get("model", {})
            if "voices" in own:
                return Voices(names=tuple(own["voices"]), default=own.get("default_voice"))
        return Voices()

    def validate(self, config: OmniConfig, request: SpeechRequest) -> None:
        known_voice(self.voices(config), request.voice_name)
        refuse_fields(
            request,
            ("ref_audio", "ref_text"),
            "this model clones no voices",
        )
        if request.task_type not in (None, PRESET_VOICES_TASK):
            raise InvalidRequestError(
                f"task_type: {request.task_type!a} is not offered by this model; allowed: "
                f"{PRESET_VOICES_TASK!r}",
                param="task_type",
            )

    def build(self, config: OmniConfig, request: SpeechRequest) -> SpeechJob:
        voice = known_voice(self.voices(config), request.voice_name)
        return SpeechJob(
            prompt={"messages": _messages(request)},
            params=[_params(stage, request, voice) for stage in config.stages],
            modalities=("text", "audio"),
        )


def _messages(request: SpeechRequest) -> list[dict[str, Any]]:
    wishes = [_PERSONA, _TASK]
    if request.language is not None:
        wishes.append(f"The text is in this language: {request.language}.")
    if request.instructions:
        wishes.append(f"How to speak: {request.instructions}")
    return [
        {"role": "system", "content": "\n".join(wishes)},
        {"role": "user", "content": request.input},
    ]


def _params(stage: ResolvedStage, request: SpeechRequest, voice: str | None) -> SamplingParams:
    kind = PARAMS_BY_EXECUTION[ExecutionType(stage.stage.execution_type)]
    if kind is not OmniTokenSamplingParams:
        return kind()
    if stage.stage.output_modality is Modality.TEXT:
        # Greedy: the text is repeated, not invented; a model that does not stop is cut.
        most = _TOKENS_PER_CHAR * len(request.input) + _SPARE_TOKENS
        return OmniTokenSamplingParams(temperature=0.0, seed=request.seed, max_tokens=most)
    return OmniTokenSamplingParams(
        seed=request.seed,
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        repetition_penalty=request.repetition_penalty,
        delta=request.stream is not False,
        extra_args={} if voice is None else {"voice": voice},
    )
