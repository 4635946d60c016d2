"""The plan of a whole `diffusers` pipeline, from its `model_index.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.budget import MemoryBudget
from omnistage.memory.checkpoint import has_variant
from omnistage.memory.classes import component_class, named_pipeline_class
from omnistage.memory.float8_layers import QuantizationRequest
from omnistage.memory.names import and_more, with_nearest
from omnistage.memory.plan import LoadPlan, gib
from omnistage.memory.planner import component_checkpoint, plan_tensors, resolve_dtype
from omnistage.memory.skeleton import WEIGHT_STEMS, library_of, read_config

INDEX_NAME = "model_index.json"


@dataclass(frozen=True, kw_only=True)
class LibraryComponent:
    """A component without weights to plan (tokenizer, processor, scheduler): its own library's
    `from_pretrained` reads it."""

    cls: type
    folder: Path


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """What a pipeline consists of and where each part comes from.

    `modules` and `others` are by component; `settings` are the plain values of the index that the
    pipeline's constructor takes; `absent` are optional components that the index leaves out.
    """

    folder: Path
    pipeline_class: type
    dtype: str
    device: str
    modules: Mapping[str, LoadPlan]
    others: Mapping[str, LibraryComponent]
    settings: Mapping[str, Any]
    absent: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(plan.total_bytes for plan in self.modules.values())

    @property
    def bytes_by_device(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for plan in self.modules.values():
            totals.update(plan.bytes_by_device)
        return dict(totals)

    def describe(self) -> str:
        """The plan for people, several lines: the whole, then a component a line or more."""
        lines = [
            f"{self.pipeline_class.__name__} from {self.folder}: {gib(self.total_bytes)} of "
            f"weights on {self.device} as {self.dtype}"
        ]
        largest_first = sorted(self.modules.values(), key=lambda plan: -plan.total_bytes)
        lines += [line for plan in largest_first for line in plan.describe().split("\n")]
        lines += [f"{name}: {other.cls.__name__}" for name, other in self.others.items()]
        if self.settings:
            lines.append(
                "settings: " + ", ".join(f"{name}={value}" for name, value in self.settings.items())
            )
        if self.absent:
            lines.append(f"absent: {', '.join(self.absent)}")
        return "\n  ".join(lines)


def plan_pipeline(
    model_path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    pipeline_class: type | None = None,
    budget: MemoryBudget | None = None,
    variant: str | None = None,
    allow_unexpected: bool = False,
    quantization: QuantizationRequest | None = None,
) -> PipelinePlan:
    """Plan the pipeline that lies in `model_path`. Reads configurations and headers, no weights.

    `dtype` is "auto" (float32 on the CPU, elsewhere the dtype that most weights are stored in, the
    same for all components), "float32", "bfloat16" or "float16". `pipeline_class` replaces the
    class that the index names, `variant` ("fp16") chooses files in those components that have it,
    and `allow_unexpected` is that of `plan_module`. `quantization` says how what is stored in
    float8 computes. Raises `CheckpointError` naming the file, key or class at fault, and
    `ConfigurationError` when `budget` is too small.
    """
    index = read_index(model_path)
    if pipeline_class is None:
        pipeline_class = named_pipeline_class(index.get("_class_name"), model_path / INDEX_NAME)
    entries, settings, absent = _sort_out(pipeline_class, index, model_path)
    classes = {
        name: component_class(name, entry, model_path / INDEX_NAME)
        for name, entry in entries.items()
    }
    folders = {name: _component_folder(model_path, name) for name in classes}
    models = {name: cls for name, cls in classes.items() if library_of(cls) is not None}
    configs = {
        name: read_config(cls, folders[name], quantized=True) for name, cls in models.items()
    }
    variants = _variants(models, folders, variant)
    checkpoints = {
        name: component_checkpoint(cls, folders[name], variants.get(name))
        for name, cls in models.items()
    }
    dtype = resolve_dtype(dtype, device, checkpoints.values())
    plan = PipelinePlan(
        folder=model_path,
        pipeline_class=pipeline_class,
        dtype=dtype,
        device=device,
        modules={
            name: plan_tensors(
                cls,
                configs[name],
                checkpoints[name],
                component=name,
                dtype=dtype,
                device=device,
                allow_unexpected=allow_unexpected,
                quantization=quantization or QuantizationRequest(device=device),
            )
            for name, cls in models.items()
        },
        others={
            name: LibraryComponent(cls=cls, folder=folders[name])
            for name, cls in classes.items()
            if name not in models
        },
        settings=settings,
        absent=absent,
    )
    if budget is not None:
        budget.check(plan.bytes_by_device, what=pipeline_class.__name__)
    return plan


def read_index(model_path: Path) -> dict[str, Any]:
    """`model_index.json` as it is. Raises `CheckpointError` with one line of what is wrong."""
    if not model_path.exists():
        raise CheckpointError(f"model path {model_path} does not exist")
    if not model_path.is_dir():
        raise CheckpointError(
            f"model path {model_path} is a file; a directory with a {INDEX_NAME} is needed"
        )
    path = model_path / INDEX_NAME
    if not path.is_file():
        there = and_more(sorted(entry.name for entry in model_path.iterdir())) or "nothing"
        raise CheckpointError(
            f"{model_path} is no diffusers pipeline: it has no {INDEX_NAME}; found: {there}"
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(index, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return index


def _sort_out(
    pipeline_class: Any, index: dict[str, Any], model_path: Path
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Split the index into components, plain settings and absent components, by the rules of
    `DiffusionPipeline.from_pretrained`."""
    index = {key: value for key, value in index.items() if key != "_ignore_files"}
    expected, optional = pipeline_class._get_signature_keys(pipeline_class)
    init, _, _ = pipeline_class.extract_init_dict(dict(index))
    settings = {
        name: init.pop(name)
        for name in optional
        if name in init and name not in pipeline_class._optional_components
    }
    for name, entry in init.items():
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise CheckpointError(
                f"{model_path / INDEX_NAME} has {entry!r} for {name!r}; a pair of library and "
                "class is expected"
            )
    entries = {name: entry for name, entry in init.items() if entry[0] is not None}
    lacking = sorted(set(expected) - set(entries) - set(settings))
    needed = [name for name in lacking if name not in pipeline_class._optional_components]
    if needed:
        raise CheckpointError(
            f"{model_path / INDEX_NAME} lacks {with_nearest(needed, sorted(index))}, which "
            f"{pipeline_class.__name__} needs"
        )
    return entries, settings, tuple(lacking)


def _variants(
    models: Mapping[str, type], folders: Mapping[str, Path], variant: str | None
) -> dict[str, str]:
    """The components that have the wanted variant; the others are taken as they are."""
    if variant is None:
        return {}
    found = {
        name: variant
        for name, cls in models.items()
        if has_variant(folders[name], stem=WEIGHT_STEMS[str(library_of(cls))], variant=variant)
    }
    if not found:
        raise CheckpointError(f"no component has its weights in the variant {variant!r}")
    return found


def _component_folder(model_path: Path, name: str) -> Path:
    """The component's own folder, or, as in diffusers, the model's where there is none."""
    folder = model_path / name
    if folder.is_dir():
        return folder
    if all(path.name == INDEX_NAME for path in model_path.glob("*.json")):
        raise CheckpointError(
            f"{folder} is missing: {INDEX_NAME} names {name!r} as a component; download it again"
        )
    return model_path
