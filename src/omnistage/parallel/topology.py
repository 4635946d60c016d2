"""Which rank sits where: the one source of truth for sizes, coordinates and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import ConfigurationError
from omnistage.parallel.overlays import Overlays, flag

DIMENSIONS = ("data", "pipeline", "cfg", "ring", "sequence", "tensor", "rank")
"""Outermost first: ranks that differ in the last only are neighbours."""

WITHOUT_COLLECTIVES = "rank"
"""Ranks that differ in this dimension alone talk through their leader only."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of one replica, numbered row-major over `DIMENSIONS`. `overlays` group the same
    ranks once more."""

    sizes: Mapping[str, int]
    overlays: Overlays

    @classmethod
    def of(cls, config: ParallelConfig) -> Topology:
        """Raises `ConfigurationError` naming the flag of a size that cannot be and
        `UnsupportedCombinationError` for sizes that exclude each other."""
        sizes = {name: getattr(config, f"{name}_parallel_size") for name in DIMENSIONS}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigurationError(f"{flag(name)} is {size}; it must be at least 1")
        overlays = Overlays.of(config, sizes)
        if prod(sizes.values()) == 1:  # HSDP alone: its ranks differ in their shards only.
            sizes["rank"] = overlays.hsdp_ranks
        topology = cls(sizes=sizes, overlays=overlays)
        assert topology.world_size == config.world_size, "a dimension is missing here"
        return topology

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def needs_collectives(self) -> bool:
        """Whether any ranks talk to each other without their leader."""
        return self.world_size > self.sizes[WITHOUT_COLLECTIVES] or self.overlays.hsdp_ranks > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank in each dimension."""
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(
                f"rank {rank} does not exist; this replica has ranks 0 to {self.world_size - 1}"
            )
        places = {}
        for name in reversed(DIMENSIONS):
            rank, places[name] = divmod(rank, self.sizes[name])
        return {name: places[name] for name in DIMENSIONS}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The inverse of `coordinates`; a dimension left out counts as 0."""
        rank = 0
        for name in DIMENSIONS:
            place = coordinates.get(name, 0)
            if not 0 <= place < self.sizes[name]:
                raise ConfigurationError(
                    f"{name} coordinate {place} does not exist; allowed: 0 to "
                    f"{self.sizes[name] - 1}"
                )
            rank = rank * self.sizes[name] + place
        return rank

    def groups(self, dimension: str) -> list[list[int]]:
        """All groups along a dimension or an overlay: of a dimension, the ranks in each differ in
        it alone. Every rank is in exactly one; the order is the same on every rank."""
        if dimension not in DIMENSIONS:
            return self.overlays.groups(dimension, self.world_size)
        others = [name for name in DIMENSIONS if name != dimension]
        return [
            [
                self.rank(dict(zip(others, places, strict=True)) | {dimension: place})
                for place in range(self.sizes[dimension])
            ]
            for places in product(*(range(self.sizes[name]) for name in others))
        ]

    def group_of(self, dimension: str, rank: int) -> list[int]:
        """The group along a dimension or an overlay that holds this rank."""
        if dimension not in DIMENSIONS:
            groups = self.groups(dimension)
            return next(group for group in groups if rank in group)
        place = self.coordinates(rank)
        return [self.rank(place | {dimension: other}) for other in range(self.sizes[dimension])]

    def size(self, dimension: str) -> int:
        """How many ranks a group along a dimension or an overlay has."""
        if dimension in DIMENSIONS:
            return self.sizes[dimension]
        return self.overlays.sizes[dimension]
