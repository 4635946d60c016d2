"""Qwen3-Omni: a thinker writes, a talker speaks what it writes, a codec decoder makes it sound.

The talker begins with the thinker's first token and the decoder with the talker's first frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.config.pipeline import ENTRY, ExecutionType, PipelineConfig, StageConfig
from omnistage.contracts.modalities import Modality
from omnistage.models.token_index import GENERATION_CONFIG

MODEL_TYPE = "qwen3_omni_moe"
THINKER, TALKER, CODE2WAV = 0, 1, 2
TOKEN_RUNTIME = "omnistage.ar.runtime:TokenRuntime"
GENERATION_RUNTIME = "omnistage.ar.generation.runtime:GenerationRuntime"
LOADING = "omnistage.models.qwen3_omni.loading"
DECODER = "omnistage.models.qwen3_omni.code2wav:build_code2wav"

INPUTS = frozenset({Modality.TEXT, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO})

DEFAULT_VOICE = "ethan"
"""`Qwen3OmniMoeForConditionalGeneration.generate`."""

TALKER_DEFAULTS: dict[str, Any] = {
    "max_tokens": 4096,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
}
"""`Qwen3OmniMoeForConditionalGeneration.generate`."""

_NAMES = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""Of `generation_config.json`, and what we call them."""


def pipeline_config(index: Mapping[str, Any]) -> PipelineConfig:
    """From the content of `config.json` with that of `generation_config.json`. A checkpoint that
    was saved without its talker (`enable_audio_output` false) is the thinker alone."""
    generation = index.get(GENERATION_CONFIG) or {}
    speaks = bool(index.get("enable_audio_output", True))
    stages = [_thinker()]
    defaults = {THINKER: _thinker_defaults(generation)}
    options: dict[int, dict[str, Any]] = {THINKER: {"token_model": f"{LOADING}:build_thinker"}}
    if speaks:
        stages += [_talker(), _code2wav()]
        options[THINKER] |= {"feeds_stages": True, "emits_payload": True}
        options[TALKER] = {
            "token_model": f"{LOADING}:build_talker",
            "feeds_stages": True,
            "emits_payload": True,
            "model": _voices(index),
        }
        options[CODE2WAV] = {"codec_model": DECODER}
        defaults[TALKER] = TALKER_DEFAULTS | _of_part(generation, "talker")
    return PipelineConfig(
        model_type=MODEL_TYPE,
        stages=tuple(stages),
        hf_architectures=("Qwen3OmniMoeForConditionalGeneration",),
        default_sampling_params=defaults,
        options=options,
    )


def _thinker() -> StageConfig:
    return StageConfig(
        stage_id=THINKER,
        name="thinker",
        execution_type=ExecutionType.LLM_AR,
        runtime=TOKEN_RUNTIME,
        input_sources=(ENTRY,),
        final_output=True,
        output_modality=Modality.TEXT,
        input_modalities=INPUTS,
    )


def _talker() -> StageConfig:
    return StageConfig(
        stage_id=TALKER,
        name="talker",
        execution_type=ExecutionType.LLM_AR,
        runtime=TOKEN_RUNTIME,
        input_sources=(THINKER,),
        output_modality=Modality.TOKENS,
    )


def _code2wav() -> StageConfig:
    return StageConfig(
        stage_id=CODE2WAV,
        name="code2wav",
        execution_type=ExecutionType.LLM_GENERATION,
        runtime=GENERATION_RUNTIME,
        input_sources=(TALKER,),
        final_output=True,
        output_modality=Modality.AUDIO,
        input_modalities=frozenset({Modality.TOKENS}),
    )


def _voices(index: Mapping[str, Any]) -> dict[str, Any]:
    """What a server lists; the default voice is the one that the talker takes."""
    names = list((index.get("talker_config") or {}).get("speaker_id") or {})
    default = DEFAULT_VOICE if DEFAULT_VOICE in names else next(iter(names), None)
    return {"voices": names, "default_voice": default}


def _thinker_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy unless the checkpoint says `do_sample`, as in `transformers`."""
    plain = {name: generation.get(name) for name in (*_NAMES, "do_sample")}
    named = plain | {
        name: generation[f"thinker_{name}"] for name in plain if f"thinker_{name}" in generation
    }
    found = _renamed(named)
    if not named.get("do_sample"):
        kept = ("max_tokens", "repetition_penalty")
        return {"temperature": 0.0} | {name: found[name] for name in kept if name in found}
    return {"temperature": 1.0} | found


def _of_part(generation: Mapping[str, Any], part: str) -> dict[str, Any]:
    return _renamed({name: generation.get(f"{part}_{name}") for name in _NAMES})


def _renamed(named: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: named[name] for name, ours in _NAMES.items() if named.get(name) is not None}
