"""Qwen2.5-Omni: a thinker writes, a talker speaks what it writes, token2wav makes it sound.

The talker begins with the thinker's second token, whose coming shows what it made of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.config.pipeline import ENTRY, ExecutionType, PipelineConfig, StageConfig
from omnistage.contracts.modalities import Modality
from omnistage.models.token_index import GENERATION_CONFIG

MODEL_TYPE = "qwen2_5_omni"
THINKER, TALKER, TOKEN2WAV = 0, 1, 2
TOKEN_RUNTIME = "omnistage.ar.runtime:TokenRuntime"
GENERATION_RUNTIME = "omnistage.ar.generation.runtime:GenerationRuntime"
FOLDER = "omnistage.models.qwen2_5_omni"

INPUTS = frozenset({Modality.TEXT, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO})

DEFAULT_VOICE = "Chelsie"
"""`Qwen2_5OmniForConditionalGeneration.generate`."""

VOICES = ("Chelsie", "Ethan")
"""What a server lists: those of the released checkpoints; the talker takes all of `spk_dict.pt`."""

THINKER_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1024}
TALKER_DEFAULTS: dict[str, Any] = {
    "max_tokens": 4096,
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
}
"""Both: `Qwen2_5OmniForConditionalGeneration.generate`; a thinker samples where the checkpoint's
`generation_config.json` says so."""

_NAMES = {
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
    stages = [_thinker()]
    defaults = {THINKER: THINKER_DEFAULTS | _sampling(generation)}
    options: dict[int, dict[str, Any]] = {
        THINKER: {"token_model": f"{FOLDER}.loading:build_thinker"}
    }
    if index.get("enable_audio_output", True):
        stages += [_talker(), _token2wav()]
        options[THINKER] |= {"feeds_stages": True, "emits_payload": True}
        options[TALKER] = {
            "token_model": f"{FOLDER}.loading:build_talker",
            "feeds_stages": True,
            "emits_payload": True,
            "min_input_tokens": 2,
            "model": {"voices": list(VOICES), "default_voice": DEFAULT_VOICE},
        }
        options[TOKEN2WAV] = {"codec_model": f"{FOLDER}.loading:build_token2wav"}
        defaults[TALKER] = TALKER_DEFAULTS
    return PipelineConfig(
        model_type=MODEL_TYPE,
        stages=tuple(stages),
        hf_architectures=("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"),
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


def _token2wav() -> StageConfig:
    return StageConfig(
        stage_id=TOKEN2WAV,
        name="token2wav",
        execution_type=ExecutionType.LLM_GENERATION,
        runtime=GENERATION_RUNTIME,
        input_sources=(TALKER,),
        final_output=True,
        output_modality=Modality.AUDIO,
        input_modalities=frozenset({Modality.TOKENS}),
        input_adapters={TALKER: f"{FOLDER}.codes:codes_of_tokens"},
    )


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    if not generation.get("do_sample"):
        return {}
    found = {ours: generation[name] for name, ours in _NAMES.items() if generation.get(name)}
    return {"temperature": 1.0} | found
