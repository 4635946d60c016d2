"""Two stages: the toy counts, the codec decoder of a tiny checkpoint decodes a frame a number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from omnistage.config.pipeline import ExecutionType, PipelineConfig, StageConfig
from omnistage.config.resolved import OmniConfig, ResolvedStage
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from tests.toy.deployment import RUNTIME, toy_config
from tests.toy.runtime import as_array

CODE_GROUPS, CODEBOOK_SIZE = 4, 64


def codes_of(numbers: Any) -> np.ndarray:
    """(k,) numbers → (k, CODE_GROUPS) ids that look random."""
    mixed = np.asarray(numbers, dtype=np.int64)[:, None] * 7919 + np.arange(CODE_GROUPS) * 104_729
    return (mixed * mixed // 64) % CODEBOOK_SIZE


def as_codes(data: StageData, params: Any, executor: Any) -> StageData:
    """An input adapter: each piece of the toy is one frame."""
    numbers = [as_array(value)[0] for value in data.tensors.values()]
    return StageData(modality=Modality.TOKENS, tensors={"codes": codes_of(numbers)})


def codec_config(folder: Path, *, process: str = "inline", **changes: Any) -> OmniConfig:
    count = StageConfig(
        stage_id=0,
        name="count",
        execution_type=ExecutionType.GENERIC,
        runtime=RUNTIME,
        output_modality=Modality.TOKENS,
    )
    codec = StageConfig(
        stage_id=1,
        name="codec",
        execution_type=ExecutionType.LLM_GENERATION,
        runtime="omnistage.ar.generation.runtime:GenerationRuntime",
        input_sources=(0,),
        final_output=True,
        output_modality=Modality.AUDIO,
        input_adapters={0: "tests.models.qwen3_omni.codec_stage:as_codes"},
    )
    pipeline = PipelineConfig(model_type="toy", stages=(count, codec))
    base = toy_config(ranks=1, pipeline=pipeline, process=process, options={"factor": 1.0})
    options = {"codec_model": "omnistage.models.qwen3_omni.code2wav:build_code2wav"}
    second = ResolvedStage(
        stage=codec,
        model_path=str(folder),
        process=process,
        max_num_seqs=4,
        dtype="float32",
        options=options | changes.pop("options", {}),
        **changes,
    )
    return replace(base, stages=(base.stages[0], second))
