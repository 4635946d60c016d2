"""Small pipelines to resolve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnistage.config.deploy import DeployConfig, parse_deploy
from omnistage.config.overrides import Overrides
from omnistage.config.pipeline import ExecutionType, PipelineConfig, StageConfig
from omnistage.config.resolve import resolve_config
from omnistage.config.resolved import OmniConfig
from omnistage.contracts.modalities import Modality


def diffusion_pipeline(**changes: Any) -> PipelineConfig:
    stage = StageConfig(
        stage_id=0,
        name="image",
        execution_type=ExecutionType.DIFFUSION,
        runtime="tests.config.pipelines:runtime",
        final_output=True,
        output_modality=Modality.IMAGE,
        input_modalities=frozenset({Modality.TEXT, Modality.IMAGE}),
    )
    return PipelineConfig(model_type="one_stage", stages=(stage,), **changes)


def token_pipeline(kind: ExecutionType = ExecutionType.LLM_AR) -> PipelineConfig:
    stage = StageConfig(
        stage_id=0,
        name="writer",
        execution_type=kind,
        runtime="tests.config.pipelines:runtime",
        final_output=True,
        output_modality=Modality.TEXT,
    )
    return PipelineConfig(model_type="one_stage", stages=(stage,))


def two_stage_pipeline(**changes: Any) -> PipelineConfig:
    thinker = StageConfig(
        stage_id=0,
        name="thinker",
        execution_type=ExecutionType.LLM_AR,
        runtime="tests.config.pipelines:runtime",
        output_modality=Modality.TOKENS,
        prompt_expand="tests.config.pipelines:expand",
    )
    painter = StageConfig(
        stage_id=1,
        name="painter",
        execution_type=ExecutionType.DIFFUSION,
        runtime="tests.config.pipelines:runtime",
        input_sources=(0,),
        input_adapters={0: "tests.config.pipelines:adapt"},
        input_modalities=frozenset({Modality.TOKENS}),
        final_output=True,
        output_modality=Modality.IMAGE,
    )
    return PipelineConfig(model_type="two_stages", stages=(thinker, painter), **changes)


def resolve(
    pipeline: PipelineConfig | None = None,
    *,
    yaml: str | None = None,
    accelerators: Sequence[str] = (),
    flags: Sequence[tuple[str, str]] = (),
    **kwargs: Any,
) -> OmniConfig:
    deploy: DeployConfig | None = parse_deploy(yaml) if yaml is not None else None
    overrides = Overrides.from_flags(flags) if flags else Overrides.from_kwargs(**kwargs)
    return resolve_config(
        pipeline or diffusion_pipeline(),
        model="some/model",
        model_path="/models/some",
        served_model_name="some/model",
        deploy=deploy,
        overrides=overrides,
        accelerators=accelerators,
    )
