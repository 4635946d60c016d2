"""Builds a `diffusers` pipeline from its plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError, MissingDependencyError
from omnistage.contracts.runtime import LoadReporter
from omnistage.memory.classes import pip_command
from omnistage.memory.materialize import materialize
from omnistage.memory.pipeline_plan import (
    LibraryComponent,
    PipelinePlan,
    plan_pipeline,
    read_index,
)
from omnistage.memory.progress import Progress

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["LibraryComponent", "PipelinePlan", "load_pipeline", "plan_pipeline", "read_index"]

_VOCABULARIES = ("*.model", "*.spm", "*.tiktoken", "tekken.json")
"""What transformers makes a tokenizer from, whatever files its class names."""


def load_pipeline(
    plan: PipelinePlan, report: LoadReporter = lambda note, fraction: None
) -> DiffusionPipeline:
    """Load what was planned and put it together: equal, tensor by tensor, to what
    `DiffusionPipeline.from_pretrained(folder, torch_dtype=…)` builds.

    `report` is told what is being loaded and the fraction of all bytes, at most once a percent.
    Raises `CheckpointError` or `MissingDependencyError` naming the component.
    """
    components: dict[str, Any] = dict.fromkeys(plan.absent)
    for name, other in plan.others.items():
        report(f"loading {name}", None)
        components[name] = _by_its_library(name, other)
    progress = Progress(plan.total_bytes, report)
    for name, module_plan in plan.modules.items():
        progress.begin(f"loading {name}")
        components[name] = materialize(module_plan, progress.advance)
    pipeline = plan.pipeline_class(**components, **plan.settings)
    pipeline.register_to_config(_name_or_path=str(plan.folder))
    report("loaded", 1.0)
    return pipeline


def _by_its_library(name: str, component: LibraryComponent) -> Any:
    what = f"{name} ({component.cls.__name__}) from {component.folder}"
    try:
        loaded = component.cls.from_pretrained(component.folder, local_files_only=True)
    except ImportError as error:
        package = getattr(error, "name", None)
        command = f"; install with: {pip_command(package)}" if package else ""
        raise MissingDependencyError(
            f"loading {what} needs a package that is not installed: {_first_line(error)}{command}"
        ) from error
    except Exception as error:  # the files are the user's: what a library raises for them varies
        raise CheckpointError(f"cannot load {what}: {_first_line(error)}") from error
    _check_vocabulary(what, getattr(loaded, "tokenizer", loaded), component.folder)
    return loaded


def _check_vocabulary(what: str, tokenizer: Any, folder: Path) -> None:
    """transformers builds a tokenizer without its files too, one that knows no words."""
    files: dict[str, str] = getattr(tokenizer, "vocab_files_names", None) or {}
    wanted = [name for part, name in files.items() if part != "tokenizer_config_file"]
    present = {name for name in wanted if (folder / name).is_file()}
    if files.get("tokenizer_file") in present or not wanted:
        return
    others = [path for pattern in _VOCABULARIES for path in folder.glob(pattern)]
    merges = files.get("merges_file")
    if not (present or others) or (merges and present and merges not in present):
        absent = [name for name in wanted if name not in present]
        raise CheckpointError(
            f"cannot load {what}: of its vocabulary there is no {', no '.join(absent)}"
        )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
