"""Tensors of modules by name: which move with a block, and how one is put in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omnistage.memory.host.layout import BlockLayout, image_layout
from omnistage.memory.host.preflight import block_sources
from omnistage.memory.plan import LoadPlan


def put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Make `tensor` the parameter or buffer of that name."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)


def put_empty(module: torch.nn.Module, plan: LoadPlan, paths: Sequence[str]) -> None:
    """Give blocks empty tensors of the shapes and dtypes that loading would give them."""
    for path in paths:
        for name, source in block_sources(plan, path).items():
            dtype = getattr(torch, source.dtype)
            put(module, name, torch.empty(source.shape, dtype=dtype, device="meta"))


def streamed_tensors(module: torch.nn.Module, path: str) -> dict[str, torch.Tensor]:
    """What moves with the block at `path`: its parameters and persistent buffers, each once, by
    their names in `module`. What a class computes and no checkpoint holds stays on the device."""
    block = module.get_submodule(path)
    kept = {
        f"{inner}.{name}" if inner else name
        for inner, owner in block.named_modules()
        for name in owner._non_persistent_buffers_set
    }
    found = dict(block.named_parameters())
    found |= {name: buffer for name, buffer in block.named_buffers() if name not in kept}
    return {f"{path}.{name}": tensor for name, tensor in found.items()}


def layout_of(module: torch.nn.Module, path: str) -> BlockLayout:
    """The layout of a block as it is now; its tensors may be empty ones."""
    shapes = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in streamed_tensors(module, path).items()
    }
    places, nbytes = image_layout(shapes)
    return BlockLayout(path=path, places=places, nbytes=nbytes)
