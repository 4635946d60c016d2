"""From a stage's settings to its loaded pipeline and the backend that will move its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import ConfigurationError
from omnistage.contracts.runtime import LoadReporter
from omnistage.memory.budget import MemoryBudget
from omnistage.memory.float8_layers import QuantizationRequest
from omnistage.memory.offload.base import OffloadBackend
from omnistage.memory.offload.discovery import named_components
from omnistage.memory.offload.factory import make_backend
from omnistage.memory.offload.host import HostBacking
from omnistage.memory.offload.sharding import needs_equal_waves, share_of_rank
from omnistage.memory.pipeline_loader import PipelinePlan, load_pipeline, plan_pipeline
from omnistage.memory.placement import ComponentPlacement, Placement, Residency
from omnistage.memory.planning.describe import describe_placement
from omnistage.memory.planning.facts import find_facts
from omnistage.memory.planning.on_device import place_for_serving
from omnistage.memory.planning.place import plan_placement
from omnistage.memory.planning.shape import RequestShape
from omnistage.observability.logging import get_logger
from omnistage.parallel.agreement import least_of_all
from omnistage.parallel.groups import WORLD
from omnistage.quantization.config import resolve_quantization

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from omnistage.config.resolved import ResolvedStage
    from omnistage.memory.host.seams import BlockTransform, WeightCache
    from omnistage.parallel.groups import ProcessGroups
    from omnistage.platforms.base import Platform

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedStage:
    """`offload` owns the host weights; until it is enabled, streamed and swapped weights are on the
    host. `reasons` say for people what is where, and why."""

    pipeline: DiffusionPipeline
    plan: PipelinePlan
    placement: Placement
    offload: OffloadBackend
    reasons: tuple[str, ...]


def load_stage(
    stage: ResolvedStage,
    device: str,
    platform: Platform,
    report: LoadReporter,
    groups: ProcessGroups | None = None,
) -> LoadedStage:
    """Plan, place, load. Raises what these raise; then nothing stays open."""
    quantization = QuantizationRequest(
        plan=resolve_quantization(stage.quantization_config),
        device=device,
        float8=platform.capabilities(device).float8,
    )
    plan = plan_pipeline(
        Path(stage.model_path), dtype=stage.dtype, device=device, quantization=quantization
    )
    transforms = _transforms(plan, quantization)
    report("planning", None)
    placement = _place(stage, plan, platform, device, transforms, groups)
    with explained_shortage(device, placement):
        loaded = load_pipeline(
            plan,
            report,
            placement,
            cache=_cache(stage, placement, groups),
            transforms=transforms,
            share=None if groups is None else share_of_rank(groups, needs_equal_waves(stage)),
        )
    reasons = (*describe_placement(placement).split("\n"), *loaded.reasons)
    try:
        offload = make_backend(
            placement,
            loaded.host_weights,
            platform,
            device,
            groups,
            use_allgather=needs_equal_waves(stage),
        )
    except BaseException:
        loaded.close()
        raise
    for line in reasons:
        logger.info("stage %d (%s): %s", stage.stage_id, stage.name, line)
    return LoadedStage(
        pipeline=loaded.pipeline, plan=plan, placement=placement, offload=offload, reasons=reasons
    )


def _place(
    stage: ResolvedStage,
    plan: PipelinePlan,
    platform: Platform,
    device: str,
    transforms: Mapping[str, BlockTransform],
    groups: ProcessGroups | None,
) -> Placement:
    """The planner's, or all on a device that has nowhere else to put it. Ranks that work together
    must place alike: they plan with the least that any of them has, and try nothing."""
    if platform.offload_unavailable_reason() is None:
        facts, shape = find_facts(platform, device), shape_of(stage)
        if groups is not None and groups.size(WORLD) > 1:
            shared = least_of_all(groups, facts.free_bytes, facts.host_free_bytes)
            facts = replace(facts, free_bytes=shared[0], host_free_bytes=shared[1])
            return plan_placement(plan, stage, facts, shape, transforms=transforms)
        return place_for_serving(plan, stage, platform, facts, shape, transforms)
    budget = MemoryBudget.of(stage.memory_budget_gib, device)
    budget.check(plan.bytes_by_device, what=plan.pipeline_class.__name__)
    return all_resident(plan)


def shape_of(stage: ResolvedStage) -> RequestShape:
    """What a request is that says nothing, as many of them as run at a time."""
    defaults = stage.default_sampling_params
    given = {
        "height": defaults.get("height"),
        "width": defaults.get("width"),
        "frames": defaults.get("num_frames"),
        "steps": defaults.get("num_inference_steps"),
    }
    known = {name: value for name, value in given.items() if value is not None}
    return RequestShape(requests=stage.max_num_seqs, **known)


@contextmanager
def explained_shortage(device: str, placement: Placement) -> Iterator[None]:
    """A device that is too small is said in words of what to do."""
    import torch

    try:
        yield
        return
    except torch.OutOfMemoryError as error:
        what = str(error).split(".", 1)[0]
    finer = {"none": "model or layerwise", "model": "layerwise"}.get(placement.strategy)
    change = f"use --offload {finer}" if finer else "keep fewer blocks on the device"
    raise ConfigurationError(
        f"{device} has no room for this pipeline with offload {placement.strategy!r} ({what}); "
        f"{change}, a smaller dtype, or stop what else uses the device"
    )


def all_resident(plan: PipelinePlan) -> Placement:
    return Placement(
        strategy="none",
        components={
            name: ComponentPlacement(
                component=name, residency=Residency.RESIDENT, weight_bytes=one.total_bytes
            )
            for name, one in plan.modules.items()
        },
        reasons=("offload none: all weights stay on the device",),
    )


def denoisers_move(placement: Placement, denoisers: Mapping[str, Any]) -> bool:
    """Whether weights of any of these components come and go."""
    placed = [placement.of(name) for name in denoisers]
    return any(one is not None and one.residency != "resident" for one in placed)


def describe_quantization(pipeline: DiffusionPipeline) -> dict[str, Any]:
    """By component, of those with float8 layers; see `quantization.convert.describe`."""
    from omnistage.quantization.convert import describe

    described = {name: describe(module) for name, module in named_components(pipeline).items()}
    return {name: one for name, one in described.items() if one["layers"]}


def _transforms(
    plan: PipelinePlan, quantization: QuantizationRequest
) -> Mapping[str, BlockTransform]:
    if not quantization.plan.is_on:
        return {}
    from omnistage.quantization.convert import make_transforms

    return make_transforms(
        quantization.plan,
        {name: one.skeleton.look() for name, one in plan.modules.items()},
        device=quantization.device,
        float8=quantization.float8,
    )


def _cache(
    stage: ResolvedStage, placement: Placement, groups: ProcessGroups | None
) -> WeightCache | None:
    """None where it is off, and where the checkpoint's own files serve as well ("auto")."""
    if stage.dlo_runtime_cache == "off" or not placement.streams:
        return None
    if stage.dlo_runtime_cache == "auto" and placement.backing is HostBacking.PRIVATE:
        return None
    from omnistage.memory.cache.identity import RankShare
    from omnistage.memory.cache.runtime import RuntimeCache

    share = None if groups is None else RankShare.of(groups.topology, groups.rank)
    limit_gib = stage.weight_cache_limit_gib
    return RuntimeCache.at(stage.weight_cache_dir, limit_gib=limit_gib, share=share)
