"""Groupings that add no ranks: they share out, once more, the ranks that the dimensions make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError

OVERLAYS = ("expert", "vae_patch", "hsdp_shard", "hsdp_replicate")
_FLAGS = {
    "hsdp_shard": "--hsdp-shard-size",
    "hsdp_replicate": "--hsdp-replicate-size",
    "vae_patch": "--vae-patch-parallel-size",
}


def flag(dimension: str) -> str:
    """The command line's name of the size of a dimension or an overlay."""
    return _FLAGS.get(dimension, f"--{dimension}-parallel-size")


@dataclass(frozen=True, kw_only=True)
class Overlays:
    """`sizes` by name of `OVERLAYS`; 1 where one is off. Members of an "expert", "vae_patch" or
    "hsdp_shard" group are consecutive ranks; those of an "hsdp_replicate" group hold equal shards.
    """

    sizes: Mapping[str, int]

    @classmethod
    def of(cls, config: ParallelConfig, dimensions: Mapping[str, int]) -> Overlays:
        """Raises `ConfigurationError` and `UnsupportedCombinationError` naming the flags."""
        shard, replicate = _hsdp(config, dimensions)
        world = max(prod(dimensions.values()), shard * replicate)
        sizes = {"expert": config.expert_parallel_size, "vae_patch": config.vae_patch_parallel_size}
        for name, size in sizes.items():
            if size < 1 or world % size:
                raise ConfigurationError(
                    f"{flag(name)} is {size}; it must divide the {world} rank(s) of a replica"
                )
        return cls(sizes=sizes | {"hsdp_shard": shard, "hsdp_replicate": replicate})

    @property
    def hsdp_ranks(self) -> int:
        return self.sizes["hsdp_shard"] * self.sizes["hsdp_replicate"]

    def groups(self, name: str, world_size: int) -> list[list[int]]:
        """All groups of an overlay. Every rank is in exactly one."""
        size = self.sizes[name]
        if name == "hsdp_replicate":
            shard = world_size // size
            return [list(range(first, world_size, shard)) for first in range(shard)]
        return [list(range(first, first + size)) for first in range(0, world_size, size)]


def _hsdp(config: ParallelConfig, dimensions: Mapping[str, int]) -> tuple[int, int]:
    """(shard size, replicate size); (1, 1) where HSDP is off."""
    shard, replicate = config.hsdp_shard_size, config.hsdp_replicate_size
    if not config.use_hsdp:
        if (shard, replicate) not in ((-1, 1), (1, 1)):
            raise UnsupportedCombinationError(
                f"{flag('hsdp_shard')} {shard} and {flag('hsdp_replicate')} {replicate} have no "
                "effect without --use-hsdp; add it or leave them out"
            )
        return 1, 1
    for name in ("data", "tensor"):
        if dimensions[name] > 1:
            raise UnsupportedCombinationError(
                f"--use-hsdp shards the weights itself and excludes {flag(name)} "
                f"{dimensions[name]}; leave one of them out"
            )
    if replicate < 1:
        raise ConfigurationError(f"{flag('hsdp_replicate')} is {replicate}; it must be at least 1")
    return _shard_size(shard, replicate, prod(dimensions.values())), replicate


def _shard_size(shard: int, replicate: int, ranks: int) -> int:
    """-1 takes all ranks. Alone, HSDP makes the ranks; beside another dimension it fits them."""
    if shard == -1 and ranks % replicate == 0 and ranks > 1:
        return ranks // replicate
    if shard < 2:
        raise ConfigurationError(
            f"{flag('hsdp_shard')} is {shard} for {ranks} rank(s) in {replicate} replica(s) of the "
            "shards; use at least 2, or -1 beside another dimension to take all its ranks"
        )
    if ranks not in (1, shard * replicate):
        raise ConfigurationError(
            f"{flag('hsdp_shard')} {shard} times {flag('hsdp_replicate')} {replicate} is not the "
            f"{ranks} ranks of a replica; make them equal or use {flag('hsdp_shard')} -1"
        )
    return shard
