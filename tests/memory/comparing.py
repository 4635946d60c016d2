"""Compares what the plan loads with what the libraries load, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, persistent or not, under all of their names, in order."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def module_differences(ours: torch.nn.Module, reference: torch.nn.Module) -> list[str]:
    """In words, what differs between two modules in class, names, dtypes or single bits."""
    import torch

    if type(ours) is not type(reference):
        return [f"{type(ours)} against {type(reference)}"]
    mine, theirs = dict(tensors(ours)), dict(tensors(reference))
    if list(mine) != list(theirs):
        return [f"names: {set(mine) ^ set(theirs) or 'another order'}"]
    return [
        f"{name}: {mine[name].dtype} against {tensor.dtype}"
        for name, tensor in theirs.items()
        if mine[name].dtype != tensor.dtype or not torch.equal(mine[name], tensor)
    ]


def pipeline_differences(ours: Any, reference: Any) -> list[str]:
    """The same for all components of two pipelines, and for their and their modules' settings."""
    import torch

    found = []
    if type(ours) is not type(reference) or list(ours.components) != list(reference.components):
        found.append("class or components")
    if _plain(ours.config) != _plain(reference.config):
        found.append("config of the pipeline")
    for name, theirs in reference.components.items():
        mine = ours.components[name]
        if isinstance(theirs, torch.nn.Module):
            found += [f"{name}.{words}" for words in module_differences(mine, theirs)]
            if _plain(mine.config) != _plain(theirs.config):
                found.append(f"config of {name}")
            if _generation(mine) != _generation(theirs):
                found.append(f"generation config of {name}")
        elif type(mine) is not type(theirs):
            found.append(f"class of {name}")
    return found


def _plain(config: Any) -> dict[str, Any]:
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return {key: str(value) for key, value in values.items()}


def _generation(module: Any) -> dict[str, Any] | None:
    config = getattr(module, "generation_config", None)
    return None if config is None else config.to_dict()
