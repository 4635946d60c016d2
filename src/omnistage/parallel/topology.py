"""Which rank sits where: the one source of truth for sizes, coordinates and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import ConfigurationError

DIMENSIONS = ("data", "pipeline", "cfg", "sequence", "tensor", "rank")
"""Outermost first: ranks that differ in the last only are neighbours."""


def flag(dimension: str) -> str:
    """The command line's name of a dimension's size."""
    return f"--{dimension}-parallel-size"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of one replica, numbered row-major over `DIMENSIONS`."""

    sizes: Mapping[str, int]

    @classmethod
    def of(cls, config: ParallelConfig) -> Topology:
        """Raises `ConfigurationError` naming the flag of a size below one."""
        sizes = {name: getattr(config, f"{name}_parallel_size") for name in DIMENSIONS}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigurationError(f"{flag(name)} is {size}; it must be at least 1")
        topology = cls(sizes=sizes)
        assert topology.world_size == config.world_size, "a dimension is missing here"
        return topology

    @property
    def world_size(self) -> int:
        total = 1
        for size in self.sizes.values():
            total *= size
        return total

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
        """All groups along a dimension: the ranks in each differ in that dimension alone. Every
        rank is in exactly one; the order is the same on every rank."""
        others = [name for name in DIMENSIONS if name != dimension]
        return [
            [
                self.rank(dict(zip(others, places, strict=True)) | {dimension: place})
                for place in range(self.sizes[dimension])
            ]
            for places in product(*(range(self.sizes[name]) for name in others))
        ]

    def group_of(self, dimension: str, rank: int) -> list[int]:
        """The group along a dimension that holds this rank."""
        place = self.coordinates(rank)
        return [self.rank(place | {dimension: other}) for other in range(self.sizes[dimension])]
