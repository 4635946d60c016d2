"""Qwen-Image and its editors, whose calls serve one request: each has pictures of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.config.pipeline import PipelineConfig
from omnistage.models.diffusers_generic.pipeline import pipeline_with_steps


def step_options(class_name: str) -> dict[str, Any]:
    family = f"omnistage.models.qwen_image.steps:{class_name.removesuffix('Pipeline')}Steps"
    return {"step_family": family, "supports_request_batch": "Edit" not in class_name}


def pipeline_config(index: Mapping[str, Any]) -> PipelineConfig:
    return pipeline_with_steps("qwen_image", index, step_options(index["_class_name"]))
