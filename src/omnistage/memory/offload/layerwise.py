"""Layerwise offload: blocks pass through a ring of device slots, all else stays on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.memory.host.private import PrivateWeights
from omnistage.memory.names import and_more
from omnistage.memory.offload.checks import check_blocks, check_fits
from omnistage.memory.offload.discovery import find_components, named_components, resolve
from omnistage.memory.offload.fetch import BlockFetcher, LocalFetcher
from omnistage.memory.offload.hooks import claim, stream_through, watch_adapters
from omnistage.memory.offload.host import HostBlock, HostWeights
from omnistage.memory.offload.placing import MovedTensors
from omnistage.memory.offload.ring import BlockRing
from omnistage.memory.placement import ComponentPlacement, Placement, Residency
from omnistage.platforms.base import Platform

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, eq=False)
class Streamed:
    """A component that streams."""

    name: str
    module: nn.Module
    paths: tuple[str, ...]
    weights: HostWeights | None


class LayerwiseOffload:
    """See `OffloadBackend`. `placement` says which blocks stream; `host_weights` has, by component,
    what the loader left on the host. A component without them has its blocks packed into private
    memory by `enable`.
    """

    name = "layerwise"

    def __init__(
        self,
        placement: Placement,
        host_weights: Mapping[str, HostWeights],
        platform: Platform,
        device: str,
    ) -> None:
        self._placement = placement
        self._given = dict(host_weights)
        self._platform = platform
        self._device = device
        self._undo: ExitStack | None = None
        self._ring: BlockRing | None = None
        self._adopt: Callable[[], object] | None = None
        self._described: dict[str, Any] = {}

    @property
    def is_enabled(self) -> bool:
        return self._undo is not None

    def enable(self, pipeline: Any) -> None:
        """Also raises the device's out of memory, and `StageLostError` when page locks cannot be
        taken back."""
        import torch

        self._check_free()
        streamed = [self._checked(pipeline, one) for one in self._streaming_components()]
        modules = named_components(pipeline) | find_components(pipeline).all()
        modules |= {one.name: one.module for one in streamed}
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
            undo.callback(claim(modules, self.name))
            ring, kept = self._start_ring(streamed, undo)
            moved = MovedTensors(self._device)
            undo.callback(moved.restore)
            moved.move(modules.values(), kept)
            adopt = functools.partial(moved.move, modules.values(), kept)
            for module in modules.values():
                undo.callback(watch_adapters(module, adopt))
            undo.callback(self._platform.synchronize, self._device)
            self._ring, self._adopt = ring, adopt
            self._undo = undo.pop_all()

    def disable(self) -> None:
        """Parameters are where they were before `enable`: on the host as views of host memory,
        which stays mapped as long as they do, though it is no longer page-locked. Host weights that
        were given are closed, so that another `enable` packs their blocks into private memory."""
        import torch

        undo, self._undo = self._undo, None
        self._ring = self._adopt = None
        given, self._given = self._given, {}
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as closing:
            for weights in given.values():
                closing.callback(weights.close)
            if undo is not None:
                closing.callback(undo.close)

    def refresh(self) -> None:
        """Tensors were added to the pipeline, or the host's weights written to (adapters fused)."""
        assert self._ring is not None, "not enabled"
        assert self._adopt is not None
        self._ring.forget()
        self._adopt()

    def describe(self) -> dict[str, Any]:
        """Besides: "slot_bytes"; "page_locked": whether all streamed blocks are; "staging" of those
        that are not (see `Staging`); "components" by name, with what of each is locked; and, while
        enabled, what was fetched."""
        counted = {} if self._ring is None else self._ring.counters()
        return {"strategy": self.name, **self._described, **counted}

    def make_fetcher(self, staging_bytes: int) -> BlockFetcher:
        """How images get into slots; `staging_bytes` is 0 when all weights are page-locked."""
        return LocalFetcher(self._platform, self._device, staging_bytes)

    def needs_whole(self, weights: HostWeights | None) -> bool:
        """Whether streamed blocks must be in host memory whole."""
        return True

    def _check_free(self) -> None:
        if self._undo is not None:
            raise ConfigurationError(
                f"this {self.name} offload owns a pipeline already; disable it first"
            )
        reason = self._platform.offload_unavailable_reason()
        if reason:
            raise UnsupportedCombinationError(
                f"offload {self.name!r} is not possible on {self._device}: {reason}; use "
                "--offload none"
            )

    def _streaming_components(self) -> list[ComponentPlacement]:
        components = self._placement.components
        for one in components.values():
            if one.residency is Residency.SWAPPED:
                raise UnsupportedCombinationError(
                    f"{one.component} is to be swapped, which offload {self.name!r} does not do; "
                    "allowed: resident, streamed"
                )
        streaming = [one for one in components.values() if one.streamed_blocks]
        idle = self._given.keys() - {one.component for one in streaming}
        if idle:
            raise ConfigurationError(
                f"host weights of {and_more(sorted(idle))}, of which no block is to stream"
            )
        return streaming

    def _checked(self, pipeline: Any, placed: ComponentPlacement) -> Streamed:
        module = resolve(pipeline, placed.component)
        paths = tuple(placed.streamed_blocks)
        weights = self._given.get(placed.component)
        check_blocks(placed.component, module, paths, whole=self.needs_whole(weights))
        if weights is not None:
            check_fits(placed.component, module, paths, weights)
        return Streamed(name=placed.component, module=module, paths=paths, weights=weights)

    def _start_ring(
        self, streamed: Sequence[Streamed], undo: ExitStack
    ) -> tuple[BlockRing, set[int]]:
        """The ring, with hooks on; and the `id` of all tensors that pass through it."""
        held = [self.on_host(one, undo) for one in streamed]
        self._lock_pages(held)
        slot_bytes = max((block.nbytes for _, _, blocks in held for block in blocks), default=0)
        locked = all(weights.is_page_locked for _, weights, _ in held)
        fetcher = self.make_fetcher(0 if locked else slot_bytes)
        undo.callback(fetcher.close)
        ring = BlockRing(self._platform, self._device, fetcher, slot_bytes)
        undo.callback(ring.close)
        kept: set[int] = set()
        for one, weights, blocks in held:
            added = ring.add(one.module, weights, blocks)
            kept.update(id(tensor) for block in added for tensor in block.tensors)
            undo.callback(stream_through(ring, one.module, added))
        self._described = {
            "slot_bytes": slot_bytes,
            "page_locked": locked,
            "staging": str(fetcher.staging),
            "components": {one.name: _described(weights, blocks) for one, weights, blocks in held},
        }
        return ring, kept

    def on_host(
        self, one: Streamed, undo: ExitStack
    ) -> tuple[Streamed, HostWeights, list[HostBlock]]:
        weights = one.weights
        if weights is None:
            origins = MovedTensors(self._device)
            origins.remember(one.module.get_submodule(path) for path in one.paths)
            undo.callback(origins.restore)
            weights = PrivateWeights.pack(one.module, one.paths)
            undo.callback(weights.close)
        return one, weights, [weights.blocks[path] for path in one.paths]

    def _lock_pages(self, held: Sequence[tuple[Streamed, HostWeights, list[HostBlock]]]) -> None:
        left_bytes = self._placement.page_lock_limit_bytes
        for _, weights, _ in held:
            locked = weights.is_page_locked or weights.page_lock(
                self._platform, self._device, left_bytes
            )
            if locked and left_bytes is not None:
                left_bytes = max(0, left_bytes - weights.locked_bytes)


def _described(weights: HostWeights, blocks: Sequence[HostBlock]) -> dict[str, Any]:
    return {
        "streamed_blocks": len(blocks),
        "streamed_bytes": sum(block.copied_bytes for block in blocks),
        "host": str(weights.backing),
        "page_locked": weights.is_page_locked,
        "locked_bytes": weights.locked_bytes,
    }
