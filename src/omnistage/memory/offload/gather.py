"""Streamed blocks of which each rank holds a share: a copy of its own part, then an all-gather."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from omnistage.contracts.errors import StageLostError
from omnistage.memory.offload.fetch import LocalFetcher, Staging, Transfer
from omnistage.memory.offload.host import HostBlock, HostPiece, HostWeights
from omnistage.memory.offload.sharding import Share
from omnistage.parallel.failures import is_collective_fault, lost_rank
from omnistage.parallel.groups import ProcessGroups, set_deadline

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import Platform

_TOPIC_ALL = -1


class WeightGroup:
    """The ranks that together hold one copy of the streamed weights; `share` is this
    one's. Before every collective on the device they agree, on the host, that it is the same one:
    none starts that another does not join.

    Every call is collective and raises `StageLostError` when a rank does something else, is gone,
    or does not come within the deadline of the groups.
    """

    def __init__(self, groups: ProcessGroups, name: str) -> None:
        self.name = name
        self.share = Share(index=groups.rank_in(name), count=groups.size(name))
        self._device_group, self._host_group = groups.group_apart(name)
        self._on_gpu = groups.device != "cpu"
        self._loss: StageLostError | None = None
        self._abandoned = False

    @property
    def is_lost(self) -> bool:
        """Whether a call failed; then every later one does."""
        return self._loss is not None

    def abandon(self) -> None:
        """Gathers that were started and cannot end any more are given up: what they were to fill
        holds anything."""
        import torch.distributed as dist

        if self._on_gpu and not self._abandoned:
            dist.distributed_c10d._abort_process_group(self._device_group)
        self._abandoned = True

    def settle(self, timeout_s: float) -> None:
        """Loading is over: from now on this is the deadline. Not collective."""
        set_deadline(self._device_group, timeout_s)
        set_deadline(self._host_group, timeout_s)

    def agree(self, topic: int, what: str) -> None:
        """All ranks come here with the same `topic` (0 to 2**62)."""
        lowest, highest, _ = self._exchange(topic, 0)
        if lowest != highest:
            raise self._lost(
                StageLostError(
                    "the ranks of this stage fell out of step over their weights; please retry",
                    detail=f"share {self.share.index} of {self.share.count} came to {what}",
                )
            )

    def all_of(self, own: bool) -> bool:
        """Whether all ranks say yes."""
        lowest, highest, least = self._exchange(_TOPIC_ALL, int(own))
        if lowest != highest:
            raise self._lost(StageLostError("the ranks of this stage load different weights"))
        return bool(least)

    def gather(self, image: torch.Tensor, own: torch.Tensor) -> None:
        """Make `image`, of equal parts of which this rank's is `own`, whole: on the current
        stream, in place."""
        import torch.distributed as dist

        if self._abandoned:
            return
        self._refuse_lost()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        try:
            gather(image, own, group=self._device_group)
        except RuntimeError as error:
            raise self._lost(error) from None

    def _exchange(self, topic: int, value: int) -> tuple[int, int, int]:
        """(lowest, highest topic, lowest value)."""
        import torch
        import torch.distributed as dist

        self._refuse_lost()
        words = torch.tensor([-topic, topic, -value])
        try:
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self._host_group)
        except RuntimeError as error:
            raise self._lost(error) from None
        lowest, highest, least = words.tolist()
        return -lowest, highest, -least

    def _lost(self, error: Exception) -> Exception:
        if is_collective_fault(error):
            error = lost_rank(error)
        if isinstance(error, StageLostError):
            self._loss = error
        return error

    def _refuse_lost(self) -> None:
        if self._loss is not None:
            raise StageLostError(self._loss.message, detail=self._loss.detail)


def digest_of(component: str, blocks: Iterable[HostBlock]) -> int:
    """Of everything that ranks must have in common to gather these blocks from each other."""
    said = [(block.path, block.nbytes, *map(repr, block.places)) for block in blocks]
    digest = hashlib.sha256(repr((component, said)).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2


class GatherFetcher:
    """See `BlockFetcher`. Blocks are those of `SharedWeights`: this rank's pieces are copied to
    their place in the slot, by `local`, and the other ranks' arrive next to them.

    Ranks prepare the same blocks in the same order. `occupies_host` is the same on all of them, for
    it decides when a block is fetched.
    """

    def __init__(
        self, platform: Platform, group: WeightGroup, local: LocalFetcher, occupies_host: bool
    ) -> None:
        self._platform = platform
        self._group = group
        self._local = local
        self._occupies_host = occupies_host
        self._numbers: dict[tuple[int, str], int] = {}

    def prepare(self, weights: HostWeights, block: HostBlock, image: torch.Tensor) -> Transfer:
        group, enqueue = self._group, self._platform.enqueue
        number = self._numbers.setdefault((id(weights), block.path), len(self._numbers))
        part, start_bytes = _part_of(block, group.share)
        own = image[start_bytes : start_bytes + part.nbytes]
        copy = self._local.prepare(weights, part, own).start

        def gather() -> None:
            group.gather(image, own)

        def start() -> None:
            group.agree(number, block.path)
            copy()
            enqueue(gather)

        return Transfer(start=start, occupies_host=self._occupies_host)

    @property
    def staging(self) -> Staging:
        return self._local.staging

    def close(self) -> None:
        self._local.close()


def _part_of(block: HostBlock, share: Share) -> tuple[HostBlock, int]:
    """One of equal parts of an image as an image of its own, and where it begins."""
    part_bytes = block.nbytes // share.count
    start_bytes = share.index * part_bytes
    pieces = tuple(
        HostPiece(source=piece.source, offset_bytes=piece.offset_bytes - start_bytes)
        for piece in block.pieces
    )
    return HostBlock(path=block.path, nbytes=part_bytes, places=(), pieces=pieces), start_bytes
