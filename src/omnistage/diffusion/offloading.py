"""Offload of one stage's pipeline: what is refused before anything is loaded, what is placed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.offload.discovery import part_of, streamable_blocks
from omnistage.memory.offload.host import HostBacking
from omnistage.memory.offload.residency import leading_residents
from omnistage.memory.offload.sharding import check_sharing
from omnistage.memory.placement import ComponentPlacement, Placement, Residency
from omnistage.platforms.registry import platform_of

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.memory.pipeline_plan import PipelinePlan
    from omnistage.memory.plan import LoadPlan

_NOTHING_MOVES = ("auto", "none")


def check_offload(stage: ResolvedStage) -> None:
    """Raises `UnsupportedCombinationError` where a strategy was chosen that the stage's devices
    have no use for."""
    check_sharing(stage)
    if stage.offload in _NOTHING_MOVES:
        return
    for device in stage.devices:
        reason = platform_of(device).offload_unavailable_reason()
        if reason is not None:
            raise UnsupportedCombinationError(
                f"offload {stage.offload!r} on {device}: {reason}; leave it out, or use a GPU "
                "(--device cuda)",
                param="offload",
            )


def placement_of(stage: ResolvedStage, plan: PipelinePlan) -> Placement:
    """What the stage's settings say, taken by the word: nothing is predicted here."""
    strategy = "none" if stage.offload == "auto" else stage.offload
    place = {"none": _resident, "model": _swapped}.get(strategy, _streamed)
    limit_gib = stage.dlo_runtime_cache_pin_limit_gib
    return Placement(
        strategy=strategy,
        components={name: place(stage, one) for name, one in plan.modules.items()},
        backing=HostBacking.RUNTIME_CACHE
        if stage.dlo_runtime_cache == "on"
        else HostBacking.CHECKPOINT,
        page_lock_limit_bytes=None if limit_gib is None else int(limit_gib * 2**30),
        reasons=(f"offload {strategy}, as the stage's settings say",),
    )


def _resident(stage: ResolvedStage, plan: LoadPlan) -> ComponentPlacement:
    return ComponentPlacement(
        component=plan.component, residency=Residency.RESIDENT, weight_bytes=plan.total_bytes
    )


def _swapped(stage: ResolvedStage, plan: LoadPlan) -> ComponentPlacement:
    """Control nets run in turn with the denoiser at every step: they stay."""
    stays = part_of(plan.component) == "autoencoders" or "controlnet" in plan.component
    if stays:
        return _resident(stage, plan)
    return ComponentPlacement(
        component=plan.component, residency=Residency.SWAPPED, weight_bytes=plan.total_bytes
    )


def _streamed(stage: ResolvedStage, plan: LoadPlan) -> ComponentPlacement:
    if part_of(plan.component) != "denoisers" or plan.by_library:
        return _resident(stage, plan)
    from omnistage.memory.host.modules import layout_of

    module = plan.skeleton.look()
    paths = streamable_blocks(module, plan.component)
    residents = leading_residents(len(paths), stage.dlo_resident_layers or 0)
    streamed = tuple(path for index, path in enumerate(paths) if index not in residents)
    sizes_bytes = [layout_of(module, path).nbytes for path in streamed]
    return ComponentPlacement(
        component=plan.component,
        residency=Residency.STREAMED if streamed else Residency.RESIDENT,
        weight_bytes=plan.total_bytes,
        streamed_blocks=streamed,
        streamed_bytes=sum(sizes_bytes),
        block_bytes=max(sizes_bytes, default=0),
    )
