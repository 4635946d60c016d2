"""From what a user names as a model to its pipeline. Imports neither torch nor diffusers.

Families are named here by import string and imported when one of their models is asked for. A
family is a module with `pipeline_config(index)`, where `index` is the content of the model's
`model_index.json`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from omnistage.config.checks import suggestion
from omnistage.config.pipeline import PipelineConfig
from omnistage.contracts.errors import CheckpointError
from omnistage.memory.hub import resolve_model
from omnistage.memory.pipeline_plan import INDEX_NAME, read_index


class Family(Protocol):
    """What a family's module offers."""

    def pipeline_config(self, index: Mapping[str, Any]) -> PipelineConfig:
        """The topology, defaults and options of a model of this family."""


class BundledModel(Family, Protocol):
    """A family of one model, which comes with the package."""

    def checkpoint_folder(self) -> Path:
        """Raises `CheckpointError` when the installation lacks it."""


BUNDLED: dict[str, str] = {
    "omnistage/tiny-image": "omnistage.models.tiny_image.pipeline",
}
"""By the name that users give."""

BUNDLED_OWNER = "omnistage/"
"""Names under it are never looked for on the hub, where someone else may own them."""

FAMILIES: dict[str, str] = {
    "FluxPipeline": "omnistage.models.flux.pipeline",
    "QwenImageEditPipeline": "omnistage.models.qwen_image.pipeline",
    "QwenImageEditPlusPipeline": "omnistage.models.qwen_image.pipeline",
    "QwenImagePipeline": "omnistage.models.qwen_image.pipeline",
    "StableDiffusion3Pipeline": "omnistage.models.stable_diffusion_3.pipeline",
}
"""By the `_class_name` of `model_index.json`; classes without a family of their own are generic."""

GENERIC_FAMILY = "omnistage.models.diffusers_generic.pipeline"


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model found. `served_name` is what clients call it unless the deployment says otherwise;
    `deploy` the name of the bundled deploy file that suits it, if it has one."""

    model_path: Path
    pipeline: PipelineConfig
    served_name: str
    deploy: str | None = None


def find_pipeline(model: str) -> ModelEntry:
    """Find a bundled model, a local directory or a hub id (downloaded where it is not cached).

    Raises `CheckpointError` when there is no such model or it is no pipeline, and
    `UnsupportedCombinationError` for a pipeline that this version cannot serve.
    """
    if model in BUNDLED:
        bundled = cast(BundledModel, importlib.import_module(BUNDLED[model]))
        folder = bundled.checkpoint_folder()
        return ModelEntry(
            model_path=folder,
            pipeline=bundled.pipeline_config(read_index(folder)),
            served_name=model,
        )
    if model.startswith(BUNDLED_OWNER) and not Path(model).exists():
        raise CheckpointError(f"no model {model!r} comes along; {suggestion(model, BUNDLED)}")
    folder = resolve_model(model)
    index = read_index(folder)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise CheckpointError(
            f"{folder / INDEX_NAME} names {class_name!r} as its _class_name; the name of a "
            "diffusers pipeline class is needed (pipelines with code of their own are not loaded)"
        )
    family = cast(Family, importlib.import_module(FAMILIES.get(class_name, GENERIC_FAMILY)))
    return ModelEntry(
        model_path=folder,
        pipeline=family.pipeline_config(index),
        served_name=folder.name if Path(model).expanduser().exists() else model,
    )
