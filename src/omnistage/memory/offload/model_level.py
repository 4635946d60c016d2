"""Model-level offload: components of a pipeline that never run at a time take turns on the device.

Before an encoder runs, denoisers leave; before a denoiser runs, encoders and all other denoisers
leave. Autoencoders and whatever else the placement calls resident stay. The host keeps the truth:
leaving copies nothing back, it drops the device's copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.memory.host.layout import view
from omnistage.memory.host.private import PrivateWeights
from omnistage.memory.offload.checks import check_blocks, tensor_at
from omnistage.memory.offload.discovery import (
    find_components,
    named_components,
    part_of,
    resolve,
)
from omnistage.memory.offload.entries import enter_by
from omnistage.memory.offload.hooks import claim, watch_adapters
from omnistage.memory.offload.host import HostBlock, HostWeights
from omnistage.memory.offload.placing import MovedTensors, tensors_of
from omnistage.memory.placement import Placement, Residency
from omnistage.platforms.base import Event, Platform

if TYPE_CHECKING:
    import torch
    from torch import nn


@runtime_checkable
class DelegatesOffload(Protocol):
    """A pipeline whose exclusive parts are nested in one component and that moves them itself.

    It keeps what the backend would: only the part that runs is on the device, both calls may be
    repeated, and after the second one nothing of its hooks is left and weights are on the host.
    """

    def enable_omni_model_cpu_offload(self, *, device: str, pin_memory: bool) -> None: ...

    def disable_omni_model_cpu_offload(self) -> None: ...


@dataclass(kw_only=True, eq=False, slots=True)
class _Swapped:
    """A component. `tensors` are those in its image; `image` is on the device while it is there."""

    name: str
    module: nn.Module
    is_denoiser: bool
    block: HostBlock
    tensors: tuple[torch.Tensor, ...]
    on_host: tuple[torch.Tensor, ...]
    arrived: Event
    image: torch.Tensor | None = None

    def bind(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.data = value

    def excludes(self, other: _Swapped) -> bool:
        return other is not self and (self.is_denoiser or other.is_denoiser)


class ModelLevelOffload:
    """See `OffloadBackend`. Swaps the components that `placement` says are swapped. Used by one
    thread at a time."""

    name = "model"

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
        self._copies: Any = None
        self._swapped: tuple[_Swapped, ...] = ()
        self._described: dict[str, Any] = {}
        self._arrivals = self._arrived_bytes = 0

    @property
    def is_enabled(self) -> bool:
        return self._undo is not None

    def enable(self, pipeline: Any) -> None:
        """Also raises the device's out of memory, and `StageLostError` when page locks cannot be
        taken back."""
        import torch

        self._check_free()
        delegated = isinstance(pipeline, DelegatesOffload)
        chosen = self._chosen(pipeline)
        if not delegated:
            _check_exclusive(type(pipeline).__name__, chosen)
        modules = named_components(pipeline) | find_components(pipeline).all()
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
            undo.callback(claim(modules, self.name))
            if delegated:
                kept = {id(tensor) for _, tensor in tensors_of(m for m, _ in chosen.values())}
            else:
                kept = self._take_over(chosen, undo)
            moved = MovedTensors(self._device)
            undo.callback(moved.restore)
            moved.move(modules.values(), kept)
            adopt = functools.partial(moved.move, modules.values(), kept)
            for module in modules.values():
                undo.callback(watch_adapters(module, adopt))
            if delegated:
                self._delegate(pipeline, undo)
            undo.callback(self._platform.synchronize, self._device)
            self._undo = undo.pop_all()

    def disable(self) -> None:
        import torch

        undo, self._undo = self._undo, None
        if undo is not None:
            with torch.inference_mode(False), torch.no_grad():
                undo.close()

    def refresh(self) -> None:
        """Weights were written to where they are now (adapters fused): the host gets them too."""
        assert self._undo is not None, "not enabled"
        self._platform.synchronize(self._device)
        for one in self._swapped:
            if one.image is not None:
                for piece in one.block.pieces:
                    stop = piece.offset_bytes + piece.source.numel()
                    piece.source.copy_(one.image[piece.offset_bytes : stop])

    def describe(self) -> dict[str, Any]:
        """Besides: "components" by name (bytes, and whether it is a denoiser), "page_locked",
        "locked_bytes", "delegated" where the pipeline moves its own parts, and how often and how
        much was brought to the device."""
        counted = {"arrivals": self._arrivals, "arrived_bytes": self._arrived_bytes}
        return {"strategy": self.name, **self._described, **counted}

    def on_device(self) -> tuple[str, ...]:
        """Names of the swapped components that are there now."""
        return tuple(one.name for one in self._swapped if one.image is not None)

    def _check_free(self) -> None:
        if self._undo is not None:
            raise ConfigurationError("this model offload owns a pipeline already; disable it first")
        reason = self._platform.offload_unavailable_reason()
        if reason:
            raise UnsupportedCombinationError(
                f"offload 'model' is not possible on {self._device}: {reason}; use --offload none"
            )
        streamed = [one.component for one in self._placement.components.values()]
        streamed = [name for name in streamed if self._placement.components[name].streamed_blocks]
        if streamed or self._given:
            raise UnsupportedCombinationError(
                f"blocks of {', '.join(streamed or self._given)} are to be streamed, which offload "
                "'model' does not do; allowed: resident, swapped"
            )

    def _chosen(self, pipeline: Any) -> dict[str, tuple[nn.Module, bool]]:
        """By name: the module, and whether it is a denoiser. Modules without weights are left."""
        chosen = {}
        for name, placed in self._placement.components.items():
            if placed.residency is Residency.SWAPPED:
                module = resolve(pipeline, name)
                if any(True for _ in module.parameters()):
                    chosen[name] = (module, part_of(name, pipeline) == "denoisers")
        return chosen

    def _take_over(self, chosen: Mapping[str, tuple[nn.Module, bool]], undo: ExitStack) -> set[int]:
        """Everything chosen is on the host with hooks on; the `id` of all tensors that swap."""
        # one module holds all, so that what two components share is found
        holder = _holder({name.replace(".", "_"): module for name, (module, _) in chosen.items()})
        paths = tuple(name for name, _ in holder.named_children())
        check_blocks("pipeline", holder, paths)
        origins = MovedTensors(self._device)
        origins.remember(holder.children())
        undo.callback(origins.restore)
        weights = PrivateWeights.pack(
            holder, paths, self._platform, self._device, self._placement.page_lock_limit_bytes
        )
        undo.callback(weights.close)
        self._copies = self._platform.stream(self._device)
        undo.callback(self._all_away)
        self._swapped = tuple(
            self._prepared(name, module, is_denoiser, holder, weights.blocks[path])
            for path, (name, (module, is_denoiser)) in zip(paths, chosen.items(), strict=True)
        )
        for one in self._swapped:
            undo.callback(enter_by(one.module, self._enter_hook(one)))
        self._described = {
            "page_locked": weights.is_page_locked,
            "locked_bytes": weights.locked_bytes,
            "delegated": False,
            "components": {
                one.name: {"bytes": one.block.nbytes, "denoiser": one.is_denoiser}
                for one in self._swapped
            },
        }
        return {id(tensor) for one in self._swapped for tensor in one.tensors}

    def _prepared(
        self, name: str, module: nn.Module, is_denoiser: bool, holder: nn.Module, block: HostBlock
    ) -> _Swapped:
        tensors = tuple(tensor_at(holder, place.name) for place in block.places)
        return _Swapped(
            name=name,
            module=module,
            is_denoiser=is_denoiser,
            block=block,
            tensors=tensors,
            on_host=tuple(tensor.data for tensor in tensors),
            arrived=self._platform.event(self._device),
        )

    def _delegate(self, pipeline: DelegatesOffload, undo: ExitStack) -> None:
        undo.callback(pipeline.disable_omni_model_cpu_offload)
        pipeline.enable_omni_model_cpu_offload(
            device=self._device, pin_memory=self._placement.page_lock_limit_bytes != 0
        )
        self._described = {"delegated": True}

    def _enter_hook(self, one: _Swapped) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if one.image is None:
                self._bring(one)
            one.arrived.wait(self._platform.current_stream(self._device))

        return before

    def _bring(self, one: _Swapped) -> None:
        """Raises the device's out of memory; then the component is still on the host."""
        import torch

        leaving = [other for other in self._swapped if other.image is not None]
        leaving = [other for other in leaving if one.excludes(other)]
        for other in leaving:
            self._send_away(other)
        if leaving:
            self._platform.empty_cache(self._device)
        with torch.inference_mode(False), torch.no_grad():
            image = torch.empty(one.block.nbytes, dtype=torch.uint8, device=self._device)
            try:
                self._copy(one, image)
            except BaseException:
                self._copies.synchronize()
                raise
            one.bind([view(image, place) for place in one.block.places])
        one.image = image
        self._arrivals += 1
        self._arrived_bytes += one.block.copied_bytes

    def _copy(self, one: _Swapped, image: torch.Tensor) -> None:
        """The image's memory may have been another's, whose readers are on the current stream."""
        free = self._platform.event(self._device)
        free.record(self._platform.current_stream(self._device))
        free.wait(self._copies)
        with self._platform.stream_scope(self._copies):
            for piece in one.block.pieces:
                stop = piece.offset_bytes + piece.source.numel()
                self._platform.upload(image[piece.offset_bytes : stop], piece.source)
            one.arrived.record(self._copies)

    def _send_away(self, one: _Swapped) -> None:
        one.bind(one.on_host)
        one.image = None

    def _all_away(self) -> None:
        self._copies.synchronize()
        self._platform.synchronize(self._device)
        for one in self._swapped:
            self._send_away(one)
        self._swapped = ()
        self._copies = None
        self._platform.empty_cache(self._device)


def _holder(modules: Mapping[str, nn.Module]) -> nn.Module:
    from torch import nn

    holder = nn.Module()
    for name, module in modules.items():
        holder.add_module(name, module)
    return holder


def _check_exclusive(pipeline: str, chosen: Mapping[str, tuple[nn.Module, bool]]) -> None:
    denoisers = sum(is_denoiser for _, is_denoiser in chosen.values())
    if len(chosen) < 2 or not denoisers:
        raise UnsupportedCombinationError(
            f"offload 'model': of {pipeline}, {', '.join(chosen) or 'nothing'} is to be swapped, "
            "and nothing takes its place meanwhile; use --offload layerwise or none"
        )
