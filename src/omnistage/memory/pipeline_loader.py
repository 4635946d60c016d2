"""Builds a `diffusers` pipeline from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError, MissingDependencyError
from omnistage.contracts.runtime import LoadReporter
from omnistage.memory.classes import pip_command
from omnistage.memory.host.seams import BlockTransform, WeightCache
from omnistage.memory.host.weight_plan import HostWeightPlan, plan_host_weights
from omnistage.memory.materialize import materialize, materialize_streamed
from omnistage.memory.offload.host import HostWeights
from omnistage.memory.pipeline_plan import (
    LibraryComponent,
    PipelinePlan,
    plan_pipeline,
    read_index,
)
from omnistage.memory.placement import Placement, Residency
from omnistage.memory.plan import LoadPlan
from omnistage.memory.progress import Progress

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from omnistage.memory.offload.sharding import Share

__all__ = [
    "LibraryComponent",
    "LoadedPipeline",
    "PipelinePlan",
    "load_pipeline",
    "plan_pipeline",
    "read_index",
]

_VOCABULARIES = ("*.model", "*.spm", "*.tiktoken", "tekken.json")
"""What transformers makes a tokenizer from, whatever files its class names."""


@dataclass(frozen=True, kw_only=True)
class LoadedPipeline:
    """`host_weights` are those of components with streamed blocks, not page-locked yet; `reasons`
    say for people where they are and why. Owned by whoever loaded it."""

    pipeline: DiffusionPipeline
    host_weights: Mapping[str, HostWeights] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def close(self) -> None:
        """Gives the host weights back; for a pipeline that no backend took over."""
        with ExitStack() as closing:
            for weights in self.host_weights.values():
                closing.callback(weights.close)


def load_pipeline(
    plan: PipelinePlan,
    report: LoadReporter = lambda note, fraction: None,
    placement: Placement | None = None,
    *,
    cache: WeightCache | None = None,
    transforms: Mapping[str, BlockTransform] | None = None,
    share: Share | None = None,
) -> LoadedPipeline:
    """Load what was planned and put it together: equal, tensor by tensor, to what
    `DiffusionPipeline.from_pretrained(folder, torch_dtype=…)` builds.

    Without a `placement` all is on the plan's device. With one, streamed blocks are views of host
    weights, and swapped components plain tensors on the CPU. `transforms` convert components, by
    name, while they are loaded. Of blocks that are packed, only the `share` is kept. `report` is
    told what is being loaded and the fraction of all bytes, at most once a percent. Raises
    `CheckpointError` or `MissingDependencyError` naming the component, and what
    `plan_host_weights` raises; then nothing stays open.
    """
    transforms = transforms or {}
    components: dict[str, Any] = dict.fromkeys(plan.absent)
    for name, other in plan.others.items():
        report(f"loading {name}", None)
        components[name] = _by_its_library(name, other)
    progress = Progress(plan.total_bytes, report)
    streaming = HostWeightPlan(components={})
    if placement is not None:
        streaming = plan_host_weights(plan, placement, cache, transforms)
    host_weights: dict[str, HostWeights] = {}
    try:
        for name, module_plan in plan.modules.items():
            progress.begin(f"loading {name}")
            advance, transform = progress.advance, transforms.get(name)
            if name in streaming.components:
                components[name], host_weights[name] = materialize_streamed(
                    module_plan,
                    streaming.components[name],
                    advance,
                    transform=transform,
                    share=share,
                )
            else:
                placed = module_plan if placement is None else _placed(module_plan, placement)
                components[name] = materialize(placed, advance, transform=transform)
        pipeline = plan.pipeline_class(**components, **plan.settings)
    except BaseException:
        with ExitStack() as closing:
            closing.callback(streaming.close)
            for weights in host_weights.values():
                closing.callback(weights.close)
        raise
    pipeline.register_to_config(_name_or_path=str(plan.folder))
    report("loaded", 1.0)
    return LoadedPipeline(pipeline=pipeline, host_weights=host_weights, reasons=streaming.reasons)


def _placed(plan: LoadPlan, placement: Placement) -> LoadPlan:
    """A swapped component is loaded where it waits."""
    one = placement.of(plan.component)
    if one is None or one.residency is not Residency.SWAPPED:
        return plan
    sources = {name: replace(source, device="cpu") for name, source in plan.sources.items()}
    return replace(plan, device="cpu", sources=sources)


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
