"""Which requests the ranks of a denoising stage serve at a time, and under what rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.diffusion.queue import QueuedRequest
from omnistage.memory.offload.sharding import needs_equal_waves
from omnistage.parallel.groups import WORLD
from omnistage.parallel.topology import Topology

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage


@dataclass(frozen=True, kw_only=True)
class WaveRules:
    """`leaders`: of each share of a wave, the rank whose result counts. With `synchronized` all
    shares take the same steps at the same time, since each step is collective. `lockstep` names
    the group whose ranks pass every step together; None: each rank goes its own way."""

    leaders: tuple[int, ...] = (0,)
    synchronized: bool = False
    lockstep: str | None = None

    @property
    def num_shares(self) -> int:
        return len(self.leaders)

    @classmethod
    def of(cls, stage: ResolvedStage) -> WaveRules:
        topology = Topology.of(stage.parallel)
        shares = topology.size("data")
        synchronized = shares > 1 and weights_are_gathered(stage)
        shared_sequence = topology.size("sequence") > 1
        lockstep: str | None
        if synchronized:
            lockstep = WORLD if shared_sequence else "data"
        else:
            lockstep = "sequence" if shared_sequence else None
        return cls(
            leaders=tuple(topology.rank({"data": share}) for share in range(shares)),
            synchronized=synchronized,
            lockstep=lockstep,
        )


def ranks_of_shares(stage: ResolvedStage) -> list[list[int]]:
    """The ranks at each place of the data dimension, which serve the same requests; the first of
    them leads."""
    topology = Topology.of(stage.parallel)
    places = [topology.coordinates(rank)["data"] for rank in range(topology.world_size)]
    return [
        [rank for rank, place in enumerate(places) if place == share]
        for share in range(topology.size("data"))
    ]


def weights_are_gathered(stage: ResolvedStage) -> bool:
    """Whether each rank holds a share of the weights, so that every forward is a collective: the
    rule that stage settings alone decide, for who has no weights in view."""
    return needs_equal_waves(stage)


def require_steps(params: OmniDiffusionSamplingParams) -> None:
    """Raises `UnsupportedCombinationError` for a request that leaves its number of steps open."""
    if params.num_inference_steps is None:
        raise UnsupportedCombinationError(
            "num_inference_steps is not given: the ranks of this stage gather their weights from "
            "each other at every step, so that all requests of a wave must state the same number "
            "of steps; set it (or a default of the stage), or start with --no-dlo-use-allgather",
            param="num_inference_steps",
        )


def plan_shares(
    ready: Sequence[QueuedRequest],
    most_of: Callable[[Hashable], int],
    rules: WaveRules,
) -> list[list[QueuedRequest]]:
    """The shares of one wave, at most one a rank, each of one `batch_key` and at most `most_of` it.

    Who is first in `ready` is served. Synchronized shares are all of its key. Ranks that are left
    over take their part of the largest share.
    """
    taken: dict[Hashable, list[QueuedRequest]] = {}
    ranks: dict[Hashable, int] = {}
    for one in ready:
        key = one.batch_key
        if rules.synchronized and key != ready[0].batch_key:
            continue
        needed = -(-(len(taken.get(key, ())) + 1) // most_of(key))
        others = sum(ranks.values()) - ranks.get(key, 0)
        if needed + others <= rules.num_shares:
            taken.setdefault(key, []).append(one)
            ranks[key] = needed
    for _ in range(rules.num_shares - sum(ranks.values())):
        key = max(taken, key=lambda key: len(taken[key]) / ranks[key], default=None)
        if key is not None and len(taken[key]) > ranks[key]:
            ranks[key] += 1
    return [share for key, batch in taken.items() for share in _evenly(batch, ranks[key])]


def _evenly(batch: list[QueuedRequest], count: int) -> list[list[QueuedRequest]]:
    """`count` parts in order whose lengths differ by one at most."""
    size, longer = divmod(len(batch), count)
    ends = [size * i + min(i, longer) for i in range(count + 1)]
    return [batch[ends[i] : ends[i + 1]] for i in range(count)]
