"""Layerwise offload of a pipeline that several ranks run: each holds a share of every block and
gathers the others', or, rank-local, holds whole blocks and talks to nobody."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from omnistage.contracts.errors import StageLostError, UnsupportedCombinationError
from omnistage.memory.offload.fetch import BlockFetcher, LocalFetcher
from omnistage.memory.offload.gather import GatherFetcher, WeightGroup, digest_of
from omnistage.memory.offload.host import HostBlock, HostWeights
from omnistage.memory.offload.layerwise import LayerwiseOffload, Streamed
from omnistage.memory.offload.sharding import DISTRIBUTED, sharing_dimension
from omnistage.memory.offload.shares import SharedWeights, stand_in
from omnistage.memory.placement import Placement
from omnistage.parallel.groups import ProcessGroups
from omnistage.platforms.base import Platform

logger = logging.getLogger(__name__)


class DistributedLayerwiseOffload(LayerwiseOffload):
    """See `LayerwiseOffload`. `groups` are this rank's; with `use_allgather`, those of
    `sharing_dimension` share the streamed blocks, if there are several.

    Then `enable` and every pass of a streamed component are collective: all ranks make the same
    calls in the same order. A rank that does not fails with `StageLostError`, as do the others, at
    the latest at the deadline of the groups. After a pass that failed on all ranks alike the next
    one is right. `disable` is not collective; blocks whose shares were copies are not whole on any
    rank then, and the component must be loaded again to be used.
    """

    name = DISTRIBUTED

    def __init__(
        self,
        placement: Placement,
        host_weights: Mapping[str, HostWeights],
        platform: Platform,
        device: str,
        groups: ProcessGroups | None = None,
        *,
        use_allgather: bool = True,
    ) -> None:
        """Raises `UnsupportedCombinationError` for groups that cannot share weights."""
        super().__init__(placement, host_weights, platform, device)
        self._groups = groups
        self._dimension: str | None = None
        self._group: WeightGroup | None = None
        self._shares: list[SharedWeights] = []
        self._sizes = {"held_bytes": 0, "gathered_bytes": 0, "largest_block_bytes": 0}
        if groups is None or not use_allgather:
            return
        if groups.topology.size("hsdp_shard") > 1:
            raise UnsupportedCombinationError(
                f"HSDP shards the weights already, so offload {self.name!r} cannot share them out "
                "once more; use --no-dlo-use-allgather"
            )
        self._dimension = sharing_dimension(groups.topology)

    def enable(self, pipeline: Any) -> None:
        if self._dimension is not None and not self.is_enabled:
            assert self._groups is not None
            self._group = WeightGroup(self._groups, self._dimension)
        super().enable(pipeline)
        self._release_whole()
        if self._group is not None and self._groups is not None:
            self._group.settle(self._groups.timeout_s)

    def disable(self) -> None:
        if self._group is not None and self.is_enabled:
            self._end_gathers(self._group)
        super().disable()
        self._shares.clear()

    def describe(self) -> dict[str, Any]:
        """Besides: "shared_by" (name of the dimension or None), "shares", "held_bytes" (of streamed
        blocks, by this rank), "gathered_bytes" (all of these blocks), "largest_block_bytes"."""
        shared = {"shared_by": self._dimension, "shares": 1}
        if self._group is not None:
            shared |= {"shares": self._group.share.count, **self._sizes}
        return super().describe() | shared

    def make_fetcher(self, staging_bytes: int) -> BlockFetcher:
        group = self._group
        if group is None:
            return super().make_fetcher(staging_bytes)
        local = LocalFetcher(self._platform, self._device, -(-staging_bytes // group.share.count))
        occupies_host = not group.all_of(staging_bytes == 0)
        return GatherFetcher(self._platform, group, local, occupies_host)

    def needs_whole(self, weights: HostWeights | None) -> bool:
        return self._group is None or not isinstance(weights, SharedWeights)

    def on_host(
        self, one: Streamed, undo: ExitStack
    ) -> tuple[Streamed, HostWeights, list[HostBlock]]:
        one, whole, blocks = super().on_host(one, undo)
        group = self._group
        if group is None:
            return one, whole, blocks
        group.agree(digest_of(one.name, blocks), f"the weights of {one.name}")
        if isinstance(whole, SharedWeights):
            assert whole.share == group.share, "loaded for another rank"
            shares = whole
        else:
            shares = SharedWeights.take(whole, one.paths, group.share)
            undo.callback(shares.close)
        undo.callback(self._shares.clear)
        self._shares.append(shares)
        self._count_bytes(blocks, shares)
        return one, shares, [shares.blocks[path] for path in one.paths]

    def _count_bytes(self, blocks: list[HostBlock], shares: SharedWeights) -> None:
        sizes = self._sizes
        sizes["held_bytes"] += sum(block.copied_bytes for block in shares.blocks.values())
        sizes["gathered_bytes"] += sum(block.nbytes for block in blocks)
        largest_bytes = max((block.nbytes for block in blocks), default=0)
        sizes["largest_block_bytes"] = max(sizes["largest_block_bytes"], largest_bytes)

    def _end_gathers(self, group: WeightGroup) -> None:
        """Those under way, whose blocks nobody will use: where a rank is gone they cannot end."""
        if not group.is_lost:
            try:
                self._platform.synchronize(self._device)
            except StageLostError as error:
                logger.warning("weights under way are given up: %s", error.detail)
        if group.is_lost:
            group.abandon()

    def _release_whole(self) -> None:
        """Last of all, when nothing can fail any more: whole blocks that were copied from go."""
        assert self._ring is not None
        for block in self._ring.blocks:
            if isinstance(block.weights, SharedWeights) and block.weights.is_packed:
                block.on_host = tuple(stand_in(tensor) for tensor in block.tensors)
                block.bind(block.on_host)
        for share in self._shares:
            share.release_whole()
