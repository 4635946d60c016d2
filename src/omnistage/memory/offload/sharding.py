"""Who shares streamed weights with whom: told from settings alone, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.parallel.topology import Topology

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.parallel.groups import ProcessGroups

DISTRIBUTED = "distributed-layerwise"
SHARING_DIMENSIONS = ("data", "sequence")
"""Those along which all ranks hold equal weights, in order of preference: the first that has more
than one rank. Tensor ranks hold different weights and never share."""


def sharing_dimension(topology: Topology) -> str | None:
    """The dimension whose groups each hold one copy of the streamed weights; None: every rank
    holds its own."""
    return next((name for name in SHARING_DIMENSIONS if topology.size(name) > 1), None)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Part `index` of `count` equal ones, of every streamed block."""

    index: int
    count: int


def share_of_rank(groups: ProcessGroups, use_allgather: bool) -> Share | None:
    """What a rank holds of streamed weights; None: all of them."""
    name = sharing_dimension(groups.topology) if use_allgather else None
    return Share(index=groups.rank_in(name), count=groups.size(name)) if name else None


def share_count(stage: ResolvedStage) -> int:
    """Into how many equal shares a stage's streamed weights are divided; 1: they are not."""
    if stage.offload != DISTRIBUTED or not stage.dlo_use_allgather:
        return 1
    topology = Topology.of(stage.parallel)
    name = sharing_dimension(topology)
    return 1 if name is None else topology.size(name)


def needs_equal_waves(stage: ResolvedStage) -> bool:
    """Whether each rank holds a share of the weights only, so that every pass of a streamed
    component is collective: all ranks of a wave must make the same passes."""
    return share_count(stage) > 1


def check_sharing(stage: ResolvedStage) -> None:
    """Raises `UnsupportedCombinationError` for settings that exclude each other."""
    if stage.offload == DISTRIBUTED and stage.dlo_use_allgather and stage.parallel.use_hsdp:
        raise UnsupportedCombinationError(
            f"--use-hsdp shards the weights already, so offload {DISTRIBUTED!r} cannot share them "
            "out once more; use --no-dlo-use-allgather, or leave one of them out",
            param="dlo_use_allgather",
        )
