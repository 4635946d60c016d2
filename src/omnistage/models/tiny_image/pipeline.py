"""The bundled model: a small Qwen-Image, trained by `training/tiny_image/`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from omnistage.config.pipeline import PipelineConfig
from omnistage.contracts.errors import CheckpointError
from omnistage.memory.pipeline_plan import INDEX_NAME
from omnistage.models.diffusers_generic.pipeline import one_stage_pipeline
from omnistage.models.qwen_image.pipeline import step_options

MODEL_TYPE = "tiny_image"
NAME = "omnistage/tiny-image"

DEFAULT_SAMPLING_PARAMS: dict[str, Any] = {
    "height": 128,
    "width": 128,
    "num_inference_steps": 10,
    "true_cfg_scale": 2.0,
    "extra_args": {"negative_prompt": ""},
}
"""Its native size (Qwen-Image's class would make 1024 x 1024), and what its training evaluates
with: guidance against the empty prompt."""


def checkpoint_folder() -> Path:
    """Where the package keeps the weights. Raises `CheckpointError` when they are not there."""
    folder = Path(str(files("omnistage.models.tiny_image"))) / "checkpoint"
    if not (folder / INDEX_NAME).is_file():
        raise CheckpointError(
            f"the bundled model {NAME} is missing from this installation; reinstall omnistage, or "
            "train it with training/tiny_image/train.py"
        )
    return folder


def pipeline_config(index: Mapping[str, Any]) -> PipelineConfig:
    return one_stage_pipeline(
        MODEL_TYPE,
        index["_class_name"],
        default_sampling_params=DEFAULT_SAMPLING_PARAMS,
        options=step_options(index["_class_name"]),
    )
