"""Tells a pipeline's library where its models run while their weights wait on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.offload.discovery import named_components


class _RunsOn:
    """What `diffusers` reads of a module's `_hf_hook`, which is how accelerate tells it the same
    (`get_module_execution_device` and `DiffusionPipeline._execution_device`, diffusers 0.42)."""

    def __init__(self, device: str) -> None:
        self.execution_device = device


def declare_execution_device(pipeline: Any, device: str) -> Callable[[], None]:
    """Make the pipeline, and others of the same components, create their inputs on `device`, for
    each component and as a whole; returns what undoes it.

    Raises `UnsupportedCombinationError` when it cannot be told.
    """
    marked: list[Any] = []

    def undo() -> None:
        while marked:
            del marked.pop()._hf_hook

    for module in named_components(pipeline).values():
        if not hasattr(module, "_hf_hook"):
            module._hf_hook = _RunsOn(device)
            marked.append(module)
    if not _runs_on(pipeline, device):
        undo()
        raise UnsupportedCombinationError(
            f"{type(pipeline).__name__} would make its inputs on {pipeline._execution_device} "
            f"while its weights wait there for {device}; use --offload none"
        )
    return undo


def _runs_on(pipeline: Any, device: str) -> bool:
    import torch

    found = torch.device(pipeline._execution_device)
    wanted = torch.device(device)
    return found.type == wanted.type and found.index in (None, wanted.index)
