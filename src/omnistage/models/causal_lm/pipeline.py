"""Any language model that `AutoModelForCausalLM` builds from code of `transformers`: one stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.config.pipeline import ExecutionType, PipelineConfig, StageConfig
from omnistage.contracts.modalities import Modality
from omnistage.models.token_index import GENERATION_CONFIG

MODEL_TYPE = "causal_lm"
TOKEN_RUNTIME = "omnistage.ar.runtime:TokenRuntime"
TOKEN_MODEL = "omnistage.models.causal_lm.model:build"

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def pipeline_config(index: Mapping[str, Any]) -> PipelineConfig:
    """From the content of `config.json` with that of `generation_config.json`; empty for GGUF."""
    stage = StageConfig(
        stage_id=0,
        name="language_model",
        execution_type=ExecutionType.LLM_AR,
        runtime=TOKEN_RUNTIME,
        final_output=True,
        output_modality=Modality.TEXT,
        input_modalities=frozenset({Modality.TEXT}),
    )
    return PipelineConfig(
        model_type=MODEL_TYPE,
        stages=(stage,),
        hf_architectures=tuple(index.get("architectures") or ())[:1],
        default_sampling_params={0: default_sampling_params(index.get(GENERATION_CONFIG) or {})},
        options={0: {"token_model": TOKEN_MODEL}},
    )


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What holds where a request says nothing: what the checkpoint's author recommends.

    As in `transformers.generate`, a model samples only where its `generation_config.json` says
    `do_sample`; else it is greedy, and so is one without that file. What is sampled with, but not
    named there, is neutral (temperature 1, no top-k: OpenAI's defaults). `max_new_tokens` bounds
    an answer only where the file says so.
    """
    named = {name: value for name, value in generation_config.items() if value is not None}
    defaults: dict[str, Any] = {"temperature": 0.0}
    if named.get("do_sample"):
        defaults = {"temperature": 1.0} | {name: named[name] for name in _SAMPLING if name in named}
    if "repetition_penalty" in named:
        defaults["repetition_penalty"] = named["repetition_penalty"]
    if "max_new_tokens" in named:
        defaults["max_tokens"] = named["max_new_tokens"]
    return defaults
