"""Components that take turns on a device: who enters sends those away that must not be there too.

The host keeps the truth: leaving copies nothing back, it drops the device's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.memory.host.layout import view
from omnistage.memory.offload.host import HostBlock
from omnistage.platforms.base import Event, Platform

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(kw_only=True, eq=False, slots=True)
class Swapped:
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

    def excludes(self, other: Swapped) -> bool:
        return other is not self and (self.is_denoiser or other.is_denoiser)


class Turns:
    """Used by one thread at a time. In between `begin` and `end`, hooks made by `enter_hook` bring
    a component to the device before it runs."""

    def __init__(self, platform: Platform, device: str) -> None:
        self.components: tuple[Swapped, ...] = ()
        self._platform = platform
        self._device = device
        self._copies: Any = None
        self._arrivals = self._arrived_bytes = 0

    def begin(self, components: Iterable[Swapped]) -> tuple[Swapped, ...]:
        """All of them are on the host."""
        self._copies = self._platform.stream(self._device)
        self.components = tuple(components)
        return self.components

    def end(self) -> None:
        """All are on the host again. Idempotent."""
        if self._copies is not None:
            self._copies.synchronize()
        self._platform.synchronize(self._device)
        for one in self.components:
            self._send_away(one)
        self.components = ()
        self._copies = None
        self._platform.empty_cache(self._device)

    def write_back(self) -> None:
        """What was written to weights on the device, to the host too."""
        self._platform.synchronize(self._device)
        for one in self.components:
            if one.image is not None:
                for piece in one.block.pieces:
                    stop = piece.offset_bytes + piece.source.numel()
                    piece.source.copy_(one.image[piece.offset_bytes : stop])

    def counters(self) -> dict[str, int]:
        return {"arrivals": self._arrivals, "arrived_bytes": self._arrived_bytes}

    def enter_hook(self, one: Swapped) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if one.image is None:
                self._bring(one)
            one.arrived.wait(self._platform.current_stream(self._device))

        return before

    def _bring(self, one: Swapped) -> None:
        """Raises the device's out of memory; then the component is still on the host."""
        import torch

        leaving = [other for other in self.components if other.image is not None]
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

    def _copy(self, one: Swapped, image: torch.Tensor) -> None:
        """The image's memory may have been another's, whose readers are on the current stream."""
        free = self._platform.event(self._device)
        free.record(self._platform.current_stream(self._device))
        free.wait(self._copies)
        with self._platform.stream_scope(self._copies):
            for piece in one.block.pieces:
                stop = piece.offset_bytes + piece.source.numel()
                self._platform.upload(image[piece.offset_bytes : stop], piece.source)
            one.arrived.record(self._copies)

    def _send_away(self, one: Swapped) -> None:
        one.bind(one.on_host)
        one.image = None
