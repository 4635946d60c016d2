"""Configurations of the toy pipeline."""

from __future__ import annotations

from typing import Any

from omnistage.config.pipeline import ENTRY, ExecutionType, PipelineConfig, StageConfig
from omnistage.config.resolved import (
    EngineLimits,
    OmniConfig,
    ParallelConfig,
    ResolvedStage,
    RestartPolicy,
)
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData

RUNTIME = "tests.toy.runtime:ToyRuntime"
FACTORS = (2.0, 10.0)
RESTART_AT_ONCE = RestartPolicy(
    max_restarts=1000, window_s=1000.0, backoff_s=0.01, max_backoff_s=0.01
)


def toy_pipeline(*, join: bool = False, both_final: bool = False) -> PipelineConfig:
    """Count → scale. With `join`, a companion runs beside every request up to stage 1."""
    first = StageConfig(
        stage_id=0,
        name="count",
        execution_type=ExecutionType.GENERIC,
        runtime=RUNTIME,
        input_sources=(ENTRY,),
        output_modality=Modality.HIDDEN,
        final_output=both_final,
        prompt_expand="tests.toy.runtime:companions" if join else None,
    )
    second = StageConfig(
        stage_id=1,
        name="scale",
        execution_type=ExecutionType.GENERIC,
        runtime=RUNTIME,
        input_sources=(0,),
        output_modality=Modality.AUDIO,
        final_output=True,
        input_adapters={0: "tests.toy.runtime:plus_one"},
        join_companions=join,
    )
    return PipelineConfig(model_type="toy", stages=(first, second))


def toy_config(
    *,
    ranks: int = 2,
    process: str | None = None,
    replicas: int = 1,
    window: int = 4,
    max_num_seqs: int = 4,
    limits: dict[str, Any] | None = None,
    restart: RestartPolicy | None = None,
    operation_limits_s: dict[str, float] | None = None,
    heartbeat_timeout_s: float = 10.0,
    options: dict[str, Any] | None = None,
    pipeline: PipelineConfig | None = None,
    shm_threshold_bytes: int = 65_536,
) -> OmniConfig:
    pipeline = pipeline or toy_pipeline()
    stages = tuple(
        ResolvedStage(
            stage=stage,
            model_path="",
            process=process or f"stage-{stage.stage_id}",
            num_replicas=replicas,
            devices=("cpu",) * ranks,
            parallel=ParallelConfig(rank_parallel_size=ranks),
            max_num_seqs=max_num_seqs,
            output_window=window,
            shm_threshold_bytes=shm_threshold_bytes,
            init_timeout_s=60.0,
            heartbeat_timeout_s=heartbeat_timeout_s,
            operation_limits_s={"forward": 30.0, "step": 30.0, "control": 30.0}
            | (operation_limits_s or {}),
            restart=restart
            or RestartPolicy(
                max_restarts=1000, window_s=1000.0, backoff_s=0.01, max_backoff_s=0.01
            ),
            options={"factor": FACTORS[stage.stage_id]} | (options or {}),
        )
        for stage in pipeline.stages
    )
    return OmniConfig(
        model="toy",
        model_path="",
        served_model_name="toy",
        pipeline=pipeline,
        stages=stages,
        limits=EngineLimits(**({"request_timeout_s": 60.0} | (limits or {}))),
        log_level="error",
    )


def counting(count: int = 3, **fields: Any) -> StageData:
    """A toy prompt."""
    return StageData(modality=Modality.TEXT, fields={"count": count, **fields})


def expected(count: int, start: int = 0) -> list[float]:
    """What the two stages make of it: `(value · 2 + 1) · 10`."""
    return [((start + i) * FACTORS[0] + 1) * FACTORS[1] for i in range(count)]
