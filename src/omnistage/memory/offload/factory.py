"""The backend for a placement."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.memory.offload.base import OffloadBackend, check_strategy
from omnistage.memory.offload.host import HostWeights
from omnistage.memory.offload.none import NoOffload
from omnistage.memory.placement import Placement
from omnistage.parallel.groups import ProcessGroups
from omnistage.platforms.base import Platform


def make_backend(
    placement: Placement,
    host_weights: Mapping[str, HostWeights],
    platform: Platform,
    device: str,
    groups: ProcessGroups | None = None,
    *,
    use_allgather: bool = True,
) -> OffloadBackend:
    """The backend that carries out `placement` on `device`; it takes `host_weights` over.

    The distributed strategy has the process groups of the rank, if there are several, share
    weights, unless `use_allgather` is off. Raises `ConfigurationError` for an unknown strategy.
    """
    strategy = check_strategy(placement.strategy)
    if strategy == "none":
        return NoOffload()
    if strategy == "layerwise":
        from omnistage.memory.offload.layerwise import LayerwiseOffload

        return LayerwiseOffload(placement, host_weights, platform, device)
    if strategy == "model":
        from omnistage.memory.offload.model_level import ModelLevelOffload

        return ModelLevelOffload(placement, host_weights, platform, device)
    from omnistage.memory.offload.distributed import DistributedLayerwiseOffload

    return DistributedLayerwiseOffload(
        placement, host_weights, platform, device, groups, use_allgather=use_allgather
    )
