"""Where the host keeps each component's streamed blocks: decided before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.host.direct import DirectWeights
from omnistage.memory.host.layout import BlockLayout
from omnistage.memory.host.preflight import directly_mappable, shared_tensor
from omnistage.memory.host.seams import BlockTransform, WeightCache
from omnistage.memory.offload.host import HostBacking, HostWeights
from omnistage.memory.plan import LoadPlan

if TYPE_CHECKING:
    from omnistage.memory.pipeline_plan import PipelinePlan
    from omnistage.memory.placement import Placement


@dataclass(frozen=True, kw_only=True)
class ComponentWeights:
    """Of one component with streamed blocks. `opened` is set unless the backing is "private": then
    blocks are packed as they are loaded, and handed to `cache`, where there is one, at the end."""

    component: str
    backing: HostBacking
    paths: tuple[str, ...]
    reason: str
    opened: HostWeights | None = None
    cache: WeightCache | None = None


@dataclass(frozen=True, kw_only=True)
class HostWeightPlan:
    """By component, of those that stream. Owns what it opened until a loader takes it over."""

    components: Mapping[str, ComponentWeights]

    @property
    def reasons(self) -> tuple[str, ...]:
        """For people, a line a component."""
        return tuple(
            f"{one.component}: streamed from {one.backing}: {one.reason}"
            for one in self.components.values()
        )

    def close(self) -> None:
        for one in self.components.values():
            if one.opened is not None:
                one.opened.close()


def plan_host_weights(
    plan: PipelinePlan,
    placement: Placement,
    cache: WeightCache | None = None,
    transforms: Mapping[str, BlockTransform] | None = None,
) -> HostWeightPlan:
    """Decide for every component of `placement` that has streamed blocks, and open what is opened.

    The checkpoint's files serve where their bytes are what is wanted; else, or where the placement
    asks for it, the cache; else private memory. Raises `UnsupportedCombinationError` for blocks
    that share a tensor with others, and `CheckpointError` for files that changed.
    """
    components: dict[str, ComponentWeights] = {}
    try:
        for name, one in placement.components.items():
            if one.streamed_blocks:
                components[name] = _decide(
                    plan.modules[name],
                    one.streamed_blocks,
                    placement.backing,
                    cache,
                    (transforms or {}).get(name),
                )
    except BaseException:
        HostWeightPlan(components=components).close()
        raise
    return HostWeightPlan(components=components)


def _decide(
    plan: LoadPlan,
    paths: tuple[str, ...],
    wanted: HostBacking,
    cache: WeightCache | None,
    transform: BlockTransform | None,
) -> ComponentWeights:
    problem = shared_tensor(plan, paths)
    if problem:
        raise UnsupportedCombinationError(
            f"{plan.component} cannot be streamed: {problem}; keep it resident (offload none), or "
            "swap whole components (offload model)"
        )
    private = ComponentWeights(
        component=plan.component, backing=HostBacking.PRIVATE, paths=paths, reason="as placed"
    )
    if wanted is HostBacking.PRIVATE:
        return private
    refusal = "it is converted while loading" if transform else directly_mappable(plan, paths)
    use_cache = cache is not None and (refusal or wanted is HostBacking.RUNTIME_CACHE)
    if not refusal and not use_cache:
        return replace(
            private,
            backing=HostBacking.CHECKPOINT,
            reason="its files hold the wanted bytes",
            opened=DirectWeights.open(plan, paths),
        )
    why = str(refusal or "as placed")
    if cache is None:
        return replace(private, reason=why)
    opened = cache.lookup(plan, planned_layouts(plan, paths, transform), transform)
    if opened is None:
        return replace(private, reason=f"{why}; not in the cache yet", cache=cache)
    backing = HostBacking.RUNTIME_CACHE
    return replace(private, backing=backing, reason=why, opened=opened)


def planned_layouts(
    plan: LoadPlan, paths: tuple[str, ...], transform: BlockTransform | None
) -> dict[str, BlockLayout]:
    """The layouts that packing will find, by path, from a module without weights."""
    from omnistage.memory.host.modules import layout_of, put_empty

    module = plan.skeleton.take()
    put_empty(module, plan, paths)
    for path in paths if transform is not None else ():
        transform(module, path)
    return {path: layout_of(module, path) for path in paths}
