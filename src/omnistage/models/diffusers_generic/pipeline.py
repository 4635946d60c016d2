"""Any `diffusers` pipeline that makes pictures: one denoising stage, in request mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.config.pipeline import ExecutionType, PipelineConfig, StageConfig
from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.contracts.modalities import Modality
from omnistage.models.diffusers_generic.classes import (
    TAKES_SEVERAL_PICTURES,
    default_sampling_params,
    needs_picture,
    output_kind,
)

MODEL_TYPE = "diffusers"
DIFFUSION_RUNTIME = "omnistage.diffusion.runtime:DiffusionRuntime"
MAX_REFERENCE_PICTURES = 10


def pipeline_config(index: Mapping[str, Any]) -> PipelineConfig:
    """From the content of `model_index.json`.

    Raises `UnsupportedCombinationError` for a class whose output is no picture.
    """
    class_name = index["_class_name"]
    kind = output_kind(class_name)
    if kind != "image":
        what = "something else than pictures" if kind == "other" else kind
        raise UnsupportedCombinationError(
            f"{class_name} makes {what}, which is not served yet; "
            "this version serves diffusers pipelines that make pictures"
        )
    return one_stage_pipeline(
        MODEL_TYPE,
        class_name,
        default_sampling_params=default_sampling_params(class_name),
        options=picture_options(class_name),
    )


def pipeline_with_steps(
    model_type: str, index: Mapping[str, Any], options: Mapping[str, Any]
) -> PipelineConfig:
    """For a family's folder: as the generic pipeline, with the family's options beside."""
    class_name = index["_class_name"]
    return one_stage_pipeline(
        model_type,
        class_name,
        default_sampling_params=default_sampling_params(class_name),
        options={**picture_options(class_name), **options},
    )


def picture_options(class_name: str) -> dict[str, Any]:
    """What the class does with pictures that a request brings."""
    options: dict[str, Any] = {}
    if needs_picture(class_name):
        options["image_input"] = "required"
    if class_name in TAKES_SEVERAL_PICTURES:
        options["max_images"] = MAX_REFERENCE_PICTURES
    return options


def one_stage_pipeline(
    model_type: str,
    class_name: str,
    *,
    default_sampling_params: dict[str, Any],
    options: dict[str, Any],
) -> PipelineConfig:
    """One denoising stage that takes a prompt, perhaps pictures, and makes pictures."""
    stage = StageConfig(
        stage_id=0,
        name="diffusion",
        execution_type=ExecutionType.DIFFUSION,
        runtime=DIFFUSION_RUNTIME,
        final_output=True,
        output_modality=Modality.IMAGE,
        input_modalities=frozenset({Modality.TEXT, Modality.IMAGE}),
    )
    return PipelineConfig(
        model_type=model_type,
        stages=(stage,),
        diffusers_class_name=class_name,
        default_sampling_params={0: default_sampling_params} if default_sampling_params else {},
        options={0: options} if options else {},
    )
