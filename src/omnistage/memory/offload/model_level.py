"""Model-level offload: components of a pipeline that never run at a time take turns on the device.

Before an encoder runs, denoisers leave; before a denoiser runs, encoders and all other denoisers
leave. Autoencoders and whatever else the placement calls resident stay. The host keeps the truth:
leaving copies nothing back, it drops the device's copy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
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
from omnistage.memory.offload.turns import Swapped, Turns
from omnistage.memory.placement import Placement, Residency
from omnistage.platforms.base import Platform

if TYPE_CHECKING:
    from torch import nn


@runtime_checkable
class DelegatesOffload(Protocol):
    """A pipeline whose exclusive parts are nested in one component and that moves them itself.

    It keeps what the backend would: only the part that runs is on the device, both calls may be
    repeated, and after the second one nothing of its hooks is left and weights are on the host.
    """

    def enable_omni_model_cpu_offload(self, *, device: str, pin_memory: bool) -> None: ...

    def disable_omni_model_cpu_offload(self) -> None: ...


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
        self._turns = Turns(platform, device)
        self._described: dict[str, Any] = {}

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
        self._turns.write_back()

    def describe(self) -> dict[str, Any]:
        """Besides: "components" by name (bytes, and whether it is a denoiser), "page_locked",
        "locked_bytes", "delegated" where the pipeline moves its own parts, and how often and how
        much was brought to the device."""
        return {"strategy": self.name, **self._described, **self._turns.counters()}

    def on_device(self) -> tuple[str, ...]:
        """Names of the swapped components that are there now."""
        return tuple(one.name for one in self._turns.components if one.image is not None)

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
        undo.callback(self._turns.end)
        components = self._turns.begin(
            self._prepared(name, module, is_denoiser, holder, weights.blocks[path])
            for path, (name, (module, is_denoiser)) in zip(paths, chosen.items(), strict=True)
        )
        for one in components:
            undo.callback(enter_by(one.module, self._turns.enter_hook(one)))
        self._described = {
            "page_locked": weights.is_page_locked,
            "locked_bytes": weights.locked_bytes,
            "delegated": False,
            "components": {
                one.name: {"bytes": one.block.nbytes, "denoiser": one.is_denoiser}
                for one in components
            },
        }
        return {id(tensor) for one in components for tensor in one.tensors}

    def _prepared(
        self, name: str, module: nn.Module, is_denoiser: bool, holder: nn.Module, block: HostBlock
    ) -> Swapped:
        tensors = tuple(tensor_at(holder, place.name) for place in block.places)
        return Swapped(
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
