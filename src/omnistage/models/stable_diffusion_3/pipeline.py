"""Stable Diffusion 3: one denoising stage, with step mode and request batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.config.pipeline import PipelineConfig
from omnistage.models.diffusers_generic.pipeline import pipeline_with_steps

STEP_OPTIONS: dict[str, Any] = {
    "step_family": "omnistage.models.stable_diffusion_3.steps:StableDiffusion3Steps",
    "supports_request_batch": True,
}


def pipeline_config(index: Mapping[str, Any]) -> PipelineConfig:
    return pipeline_with_steps("stable_diffusion_3", index, STEP_OPTIONS)
