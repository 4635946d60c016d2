"""Flux.1: one denoising stage, with step mode and request batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.config.pipeline import PipelineConfig
from omnistage.models.diffusers_generic.pipeline import pipeline_with_steps

STEP_OPTIONS: dict[str, Any] = {
    "step_family": "omnistage.models.flux.steps:FluxSteps",
    "supports_request_batch": True,
}


def pipeline_config(index: Mapping[str, Any]) -> PipelineConfig:
    return pipeline_with_steps("flux", index, STEP_OPTIONS)
