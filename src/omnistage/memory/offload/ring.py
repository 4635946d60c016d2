"""Two device slots through which a pipeline's streamed blocks pass: a cache of two images.

A block enters (its tensors become views of a slot that holds its image, copied now if need be) and
leaves (its tensors are host tensors again; the slot takes the image after the next). Copies run on
a stream of their own. Two events a slot order them with the work of blocks: no image is read before
it is complete, none is overwritten before the work that reads it is done.

Any order of calls is correct, only slower than that in which blocks were added; so is a pass that
ends in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.memory.host.layout import view
from omnistage.memory.offload.checks import tensor_at
from omnistage.memory.offload.fetch import BlockFetcher, Transfer
from omnistage.memory.offload.host import HostBlock, HostWeights
from omnistage.platforms.base import Event, Platform

if TYPE_CHECKING:
    import torch

SLOT_COUNT = 2


@dataclass(kw_only=True, eq=False, slots=True)
class RingBlock:
    """One streamed module. `tensors` are its parameters and buffers; what they hold while the block
    runs in either slot, and else, is prepared once."""

    path: str
    nbytes: int
    copied_bytes: int
    weights: HostWeights
    tensors: tuple[torch.Tensor, ...]
    on_host: tuple[torch.Tensor, ...]
    in_slot: tuple[tuple[torch.Tensor, ...], ...] = ()
    transfers: tuple[Transfer, ...] = ()
    following: RingBlock | None = field(default=None, repr=False)
    is_checked: bool = False

    def bind(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.data = value


@dataclass(kw_only=True, eq=False, slots=True)
class _Slot:
    index: int
    buffer: torch.Tensor
    filled: Event
    released: Event
    holds: RingBlock | None = None


class BlockRing:
    """Used by one thread at a time. After `close` it holds no device memory and no tensors."""

    def __init__(
        self, platform: Platform, device: str, fetcher: BlockFetcher, slot_bytes: int
    ) -> None:
        """Takes `SLOT_COUNT * slot_bytes` of the device; raises its out of memory."""
        import torch

        self._platform = platform
        self._device = device
        self._fetcher = fetcher
        self._copies: Any = platform.stream(device)
        self._slots = [
            _Slot(
                index=index,
                buffer=torch.empty(slot_bytes, dtype=torch.uint8, device=device),
                filled=platform.event(device),
                released=platform.event(device),
            )
            for index in range(SLOT_COUNT)
        ]
        for slot in self._slots:  # their memory may have been another's, whose readers still run
            slot.released.record(platform.current_stream(device))
        self._running: _Slot | None = None
        self._blocks: list[RingBlock] = []
        self.fetches = 0
        self.late_fetches = 0
        self.fetched_bytes = 0

    def add(
        self, module: torch.nn.Module, weights: HostWeights, blocks: Sequence[HostBlock]
    ) -> list[RingBlock]:
        """Streamed blocks of one component, in the order in which they run; after the last one
        comes the first one."""
        import torch

        with torch.inference_mode(False), torch.no_grad():
            added = [self._prepared(module, weights, block) for block in blocks]
        for block, following in zip(added, [*added[1:], *added[:1]], strict=True):
            block.following = following
        self._blocks += added
        return added

    def enter(self, block: RingBlock) -> None:
        """In front of the block's work, which may then be started on the current stream."""
        if self._running is not None:
            self._let_go(self._running)
        slot = self._slot_of(block)
        if slot is None:
            self.late_fetches += 1
            slot = self._fetch(block, self._victim(block))
        slot.filled.wait(self._platform.current_stream(self._device))
        self._running = slot
        block.bind(block.in_slot[slot.index])
        following = block.following
        if following is not None and not following.transfers[0].occupies_host:
            self._fetch_ahead(following, self._other(slot))

    def leave(self, block: RingBlock, *, ahead: bool = True) -> None:
        """Behind the block's work. With `ahead`, copies of what comes next are started."""
        slot = self._running
        if slot is None or slot.holds is not block:
            return
        self._let_go(slot)
        if ahead and block.following is not None:
            self._fetch_ahead(block.following, self._other(slot))
            following = block.following.following
            if following is not None:
                self._fetch_ahead(following, slot)

    def forget(self) -> None:
        """Host bytes have changed: no slot holds anything any more."""
        for slot in self._slots:
            slot.holds = None

    @property
    def blocks(self) -> tuple[RingBlock, ...]:
        """All that were added."""
        return tuple(self._blocks)

    def counters(self) -> dict[str, int]:
        """Since the start: images copied, those of them that their block had to wait for, bytes."""
        return {
            "fetches": self.fetches,
            "late_fetches": self.late_fetches,
            "fetched_bytes": self.fetched_bytes,
        }

    def close(self) -> None:
        """Waits for copies under way. Tensors are the host's again. Idempotent."""
        self._copies.synchronize()
        if self._running is not None:
            self._let_go(self._running)
        for block in self._blocks:
            block.in_slot = block.transfers = ()
            block.following = None
        self._blocks.clear()
        self._slots.clear()

    def _prepared(
        self, module: torch.nn.Module, weights: HostWeights, block: HostBlock
    ) -> RingBlock:
        tensors = [tensor_at(module, place.name) for place in block.places]
        images = [slot.buffer[: block.nbytes] for slot in self._slots]
        return RingBlock(
            path=block.path,
            nbytes=block.nbytes,
            copied_bytes=block.copied_bytes,
            weights=weights,
            tensors=tuple(tensors),
            on_host=tuple(tensor.data for tensor in tensors),
            in_slot=tuple(tuple(view(image, place) for place in block.places) for image in images),
            transfers=tuple(self._fetcher.prepare(weights, block, image) for image in images),
        )

    def _slot_of(self, block: RingBlock) -> _Slot | None:
        return next((slot for slot in self._slots if slot.holds is block), None)

    def _other(self, slot: _Slot) -> _Slot:
        return self._slots[1 - slot.index]

    def _victim(self, block: RingBlock) -> _Slot:
        """Not the slot that already has what comes next."""
        slot = self._slots[0]
        return self._slots[1] if slot.holds is not None and slot.holds is block.following else slot

    def _fetch_ahead(self, block: RingBlock, slot: _Slot) -> None:
        if slot is not self._running and self._slot_of(block) is None:
            self._fetch(block, slot)

    def _fetch(self, block: RingBlock, slot: _Slot) -> _Slot:
        if not block.is_checked:
            block.weights.check(block.path)
            block.is_checked = True
        slot.holds = None
        slot.released.wait(self._copies)
        with self._platform.stream_scope(self._copies):
            block.transfers[slot.index].start()
            slot.filled.record(self._copies)
        slot.holds = block
        self.fetches += 1
        self.fetched_bytes += block.copied_bytes
        return slot

    def _let_go(self, slot: _Slot) -> None:
        self._running = None
        slot.released.record(self._platform.current_stream(self._device))
        if slot.holds is not None:
            slot.holds.bind(slot.holds.on_host)
