"""Builds a `diffusers` pipeline from its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError, MissingDependencyError, OmniError
from omnistage.contracts.runtime import LoadReporter
from omnistage.memory.classes import pip_command
from omnistage.memory.materialize import materialize
from omnistage.memory.pipeline_plan import (
    LibraryComponent,
    PipelinePlan,
    plan_pipeline,
    read_index,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["LibraryComponent", "PipelinePlan", "load_pipeline", "plan_pipeline", "read_index"]


def _silent(note: str, fraction: float | None) -> None: ...


def load_pipeline(plan: PipelinePlan, report: LoadReporter = _silent) -> DiffusionPipeline:
    """Load what was planned and put it together: equal, tensor by tensor, to what
    `DiffusionPipeline.from_pretrained(folder, torch_dtype=…)` builds.

    `report` is told what is being loaded and the fraction of all bytes. Raises `CheckpointError`
    or `MissingDependencyError` naming the component.
    """
    components: dict[str, Any] = dict.fromkeys(plan.absent)
    for name, other in plan.others.items():
        report(f"loading {name}", None)
        components[name] = _by_its_library(name, other)
    total, done = max(plan.total_bytes, 1), 0
    for name, module_plan in plan.modules.items():

        def loaded(nbytes: int, note: str = f"loading {name}") -> None:
            nonlocal done
            done += nbytes
            report(note, min(done / total, 1.0))

        components[name] = materialize(module_plan, loaded)
    pipeline = plan.pipeline_class(**components, **plan.settings)
    pipeline.register_to_config(_name_or_path=str(plan.folder))
    report("loaded", 1.0)
    return pipeline


def _by_its_library(name: str, component: LibraryComponent) -> Any:
    what = f"{name} ({component.cls.__name__}) from {component.folder}"
    try:
        return component.cls.from_pretrained(component.folder, local_files_only=True)
    except OmniError:
        raise
    except ImportError as error:
        package = getattr(error, "name", None)
        command = f"; install with: {pip_command(package)}" if package else ""
        raise MissingDependencyError(
            f"loading {what} needs a package that is not installed: {_first_line(error)}{command}"
        ) from error
    except Exception as error:  # the files are the user's: what a library raises for them varies
        raise CheckpointError(f"cannot load {what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
