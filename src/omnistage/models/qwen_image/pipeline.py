"""Qwen-Image and its editors, whose calls serve one request: each has pictures of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.config.pipeline import PipelineConfig
from omnistage.models.diffusers_generic.pipeline import pipeline_with_steps


def pipeline_config(index: Mapping[str, Any]) -> PipelineConfig:
    name = index["_class_name"]
    options = {
        "step_family": f"omnistage.models.qwen_image.steps:{name.removesuffix('Pipeline')}Steps",
        "supports_request_batch": name == "QwenImagePipeline",
    }
    return pipeline_with_steps("qwen_image", index, options)
