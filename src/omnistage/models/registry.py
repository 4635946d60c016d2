"""From what a user names as a model to its pipeline. Imports neither torch nor diffusers.

Families are named here by import string and imported when one of their models is asked for. A
family is a module with `pipeline_config(index)`, where `index` is the content of the model's
`model_index.json`, or, for a model of `transformers`, that of `config.json` (`token_index`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from omnistage.config.checks import suggestion
from omnistage.config.pipeline import PipelineConfig
from omnistage.contracts.errors import CheckpointError, UnsupportedCombinationError
from omnistage.memory.hub import resolve_model
from omnistage.memory.pipeline_plan import INDEX_NAME, read_index
from omnistage.models.token_index import (
    CONFIG_NAME,
    causal_lm_architectures,
    find_gguf,
    token_index,
)


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

TOKEN_FAMILIES: dict[str, str] = {
    "Qwen2_5OmniForConditionalGeneration": "omnistage.models.qwen2_5_omni.pipeline",
    "Qwen2_5OmniModel": "omnistage.models.qwen2_5_omni.pipeline",
    "Qwen3OmniMoeForConditionalGeneration": "omnistage.models.qwen3_omni.pipeline",
}
"""By the first of the `architectures` of `config.json`; causal language models are generic."""

GENERIC_TOKEN_FAMILY = "omnistage.models.causal_lm.pipeline"


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
    path = resolve_model(model)
    local_name = path.stem if path.is_file() else path.name
    model_path, pipeline = _inspect(path)
    return ModelEntry(
        model_path=model_path,
        pipeline=pipeline,
        served_name=local_name if Path(model).expanduser().exists() else model,
    )


def _inspect(path: Path) -> tuple[Path, PipelineConfig]:
    """What lies at `path`, and where its weights are: a folder, or a GGUF file."""
    gguf_file = find_gguf(path)
    if gguf_file is not None:
        return gguf_file, _family(GENERIC_TOKEN_FAMILY).pipeline_config({})
    if (path / CONFIG_NAME).is_file() and not (path / INDEX_NAME).is_file():
        index = token_index(path)
        return path, _family(_token_family(index, path)).pipeline_config(index)
    index = read_index(path)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise CheckpointError(
            f"{path / INDEX_NAME} names {class_name!r} as its _class_name; the name of a "
            "diffusers pipeline class is needed (pipelines with code of their own are not loaded)"
        )
    return path, _family(FAMILIES.get(class_name, GENERIC_FAMILY)).pipeline_config(index)


def _token_family(index: Mapping[str, Any], folder: Path) -> str:
    architectures = index.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(
            f"{folder} has no {INDEX_NAME}, and its {CONFIG_NAME} names no architectures: it is "
            "neither a diffusers pipeline nor a complete transformers model"
        )
    architecture = str(architectures[0])
    if architecture in TOKEN_FAMILIES:
        return TOKEN_FAMILIES[architecture]
    if architecture in causal_lm_architectures():
        return GENERIC_TOKEN_FAMILY
    if "auto_map" in index:
        raise UnsupportedCombinationError(
            f"{folder} is a {architecture}, whose code comes with the model (auto_map in "
            f"{CONFIG_NAME}); only classes of transformers itself are run"
        )
    raise UnsupportedCombinationError(
        f"{folder} is a {architecture}, which is not served; served are causal language models of "
        f"transformers (…ForCausalLM), {', '.join(TOKEN_FAMILIES)} and diffusers pipelines"
    )


def _family(name: str) -> Family:
    return cast(Family, importlib.import_module(name))
