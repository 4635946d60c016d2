"""The frozen topology of a model: which stages it has and how they feed each other.

Written by a model's folder in `omnistage/models/`; says nothing about where or how large.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omnistage.contracts.errors import ConfigurationError
from omnistage.contracts.modalities import Modality

ENTRY = -1
"""As an input source: the request itself."""


class ExecutionType(StrEnum):
    LLM_AR = "llm_ar"
    LLM_GENERATION = "llm_generation"
    DIFFUSION = "diffusion"
    GENERIC = "generic"


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage of a pipeline.

    `runtime`, the values of `input_adapters` (by source stage id) and `prompt_expand` are import
    strings `"package.module:name"`. `prompt_expand(inputs, params) -> [(role, inputs), …]` adds
    companion children at the entry; a stage with `join_companions` waits for all of them and gets
    one payload whose tensors and fields are prefixed `"<role>."` for all roles but "main".
    """

    stage_id: int
    name: str
    execution_type: ExecutionType
    runtime: str
    input_sources: tuple[int, ...] = (ENTRY,)
    final_output: bool = False
    output_modality: Modality
    input_modalities: frozenset[Modality] = frozenset({Modality.TEXT})
    input_adapters: dict[int, str] = field(default_factory=dict)
    prompt_expand: str | None = None
    join_companions: bool = False


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A whole model. `default_sampling_params` is by stage id; `options` by stage id is handed to
    the stage's runtime as it is. Raises `ConfigurationError` when the stages form no pipeline."""

    model_type: str
    stages: tuple[StageConfig, ...]
    diffusers_class_name: str | None = None
    hf_architectures: tuple[str, ...] = ()
    default_sampling_params: dict[int, dict[str, Any]] = field(default_factory=dict)
    options: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [stage.stage_id for stage in self.stages]
        if ids != list(range(len(ids))) or not ids:
            raise ConfigurationError(
                f"pipeline {self.model_type!r}: stage ids must be 0, 1, …; got {ids}"
            )
        for stage in self.stages:
            for source in stage.input_sources:
                if source != ENTRY and not 0 <= source < stage.stage_id:
                    raise ConfigurationError(
                        f"pipeline {self.model_type!r}: stage {stage.stage_id} reads from stage "
                        f"{source}; sources must be earlier stages or the entry ({ENTRY})"
                    )
        if not any(stage.final_output for stage in self.stages):
            raise ConfigurationError(f"pipeline {self.model_type!r} has no final output stage")

    def consumers(self, stage_id: int) -> tuple[StageConfig, ...]:
        """The stages that read from `stage_id` (`ENTRY`: from the request)."""
        return tuple(stage for stage in self.stages if stage_id in stage.input_sources)
