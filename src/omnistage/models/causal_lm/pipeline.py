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

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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
        default_sampling_params={0: default_sampling_params(index.get(GENERATION_CONFIG) or {})},
        options={0: {"token_model": TOKEN_MODEL}},
    )


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What holds where a request says nothing: what the checkpoint's author recommends.

    As in `transformers.generate`, a model samples only where its `generation_config.json` says
    `do_sample`; else it is greedy, and so is one without that file. What is sampled with, but not
    named there, is neutral (temperature 1, no top-k: OpenAI's defaults).
    """
    named = {
        name: generation_config[name]
        for name in _SAMPLING
        if generation_config.get(name) is not None
    }
    if not generation_config.get("do_sample"):
        penalty = named.get("repetition_penalty")
        return {"temperature": 0.0} | ({"repetition_penalty": penalty} if penalty else {})
    return {"temperature": 1.0} | named
