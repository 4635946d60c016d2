"""Moving tensors of modules to a device and back, as the same objects."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from omnistage.contracts.errors import InternalError

if TYPE_CHECKING:
    import torch


class MovedTensors:
    """What was moved, and from where. Tensors that share memory exactly share it afterwards. Who
    moves them may be in inference mode; they do not become its tensors."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._moved: list[tuple[weakref.ref[torch.Tensor], torch.device]] = []

    def remember(self, modules: Iterable[torch.nn.Module]) -> None:
        """Let `restore` bring their tensors back to where they are now, whoever moves them."""
        self._moved += [(weakref.ref(tensor), tensor.device) for _, tensor in tensors_of(modules)]

    def move(self, modules: Iterable[torch.nn.Module], kept: Collection[int]) -> int:
        """Move what is elsewhere, but for tensors whose `id` is in `kept`; how many moved."""
        before = len(self._moved)
        copies: dict[object, torch.Tensor] = {}
        for name, tensor in tensors_of(modules):
            if id(tensor) in kept or tensor.device == self._device:
                continue
            if tensor.is_meta:
                raise InternalError(f"{name} was not loaded: it is on the meta device")
            self._moved.append((weakref.ref(tensor), tensor.device))
            _place(tensor, self._device, copies)
        return len(self._moved) - before

    def restore(self) -> None:
        copies: dict[object, torch.Tensor] = {}
        while self._moved:
            reference, device = self._moved.pop()
            tensor = reference()
            if tensor is not None:
                _place(tensor, device, copies)


def tensors_of(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each once."""
    seen: set[int] = set()
    for module in modules:
        for named in (module.named_parameters(), module.named_buffers()):
            for name, tensor in named:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield name, tensor


def _place(tensor: torch.Tensor, device: torch.device, copies: dict[object, torch.Tensor]) -> None:
    import torch

    layout = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    key = layout if tensor.numel() else id(tensor)
    with torch.inference_mode(False), torch.no_grad():
        if key not in copies:
            copies[key] = tensor.data.to(device)
        tensor.data = copies[key]
