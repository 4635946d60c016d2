"""What must hold of a component before any of it is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.contracts.tensors import ITEM_BYTES
from omnistage.memory.names import and_more, with_nearest
from omnistage.memory.offload.host import HostWeights

if TYPE_CHECKING:
    import torch
    from torch import nn


def check_blocks(
    component: str, module: nn.Module, paths: Sequence[str], *, whole: bool = True
) -> None:
    """Every path is a module of its own, made of plain tensors that nobody else uses; with `whole`,
    they have all their bytes here.

    Raises `ConfigurationError` for wrong paths, `UnsupportedCombinationError` for tensors.
    """
    known = [name for name, _ in module.named_modules()]
    missing = [path for path in paths if path not in known]
    if missing:
        raise ConfigurationError(
            f"{component} ({type(module).__name__}) has no block {with_nearest(missing, known)}"
        )
    for inner in paths:
        if any(inner == outer or inner.startswith(f"{outer}.") for outer in set(paths) - {inner}):
            raise ConfigurationError(f"{component}.{inner} is part of another streamed block")
    if len(set(paths)) < len(paths):
        raise ConfigurationError(f"{component}: a block is listed twice in {and_more(paths)}")
    for path in paths:
        block = module.get_submodule(path)
        named = [*block.named_parameters(prefix=path), *block.named_buffers(prefix=path)]
        _check_plain(component, named, whole)
        _check_dtypes(component, module, path)
    _check_unshared(component, module, paths)


def check_fits(
    component: str, module: nn.Module, paths: Sequence[str], weights: HostWeights
) -> None:
    """Raises `ConfigurationError` when the weights are not those of these blocks as they are."""
    missing = [path for path in paths if path not in weights.blocks]
    if missing:
        raise ConfigurationError(f"{component}: no host weights for {and_more(missing)}")
    for path in paths:
        for place in weights.blocks[path].places:
            tensor = tensor_at(module, place.name)
            found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if found != (place.shape, place.dtype):
                raise ConfigurationError(
                    f"{component}.{place.name} is {found[1]} {list(found[0])}, on the host it is "
                    f"{place.dtype} {list(place.shape)}"
                )


def tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its dotted name; under an adapter, that of the layer below it.

    Raises `ConfigurationError` when there is none.
    """
    path, _, attribute = name.rpartition(".")
    try:
        tensor: torch.Tensor = getattr(module.get_submodule(path), attribute)
    except AttributeError as error:
        raise ConfigurationError(f"{type(module).__name__} has no tensor {name!r}") from error
    return tensor


def _check_plain(component: str, tensors: Iterable[tuple[str, torch.Tensor]], whole: bool) -> None:
    import torch

    for name, tensor in tensors:
        if tensor.is_meta:
            problem = "is not loaded"
        elif tensor.layout is not torch.strided:
            problem = "is sparse"
        elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            problem = f"is a {type(tensor).__name__}"
        elif whole and tensor.untyped_storage().nbytes() < tensor.nbytes:
            problem = "is not whole here (expanded, or shared out among ranks)"
        elif type(tensor.data) is not torch.Tensor:
            problem = f"holds a {type(tensor.data).__name__}"
        else:
            continue
        raise UnsupportedCombinationError(
            f"{component}.{name} {problem} and cannot be streamed, only plain tensors can; use "
            "--offload none or model"
        )


def _check_dtypes(component: str, module: nn.Module, path: str) -> None:
    from omnistage.memory.host.modules import streamed_tensors

    for name, tensor in streamed_tensors(module, path).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise UnsupportedCombinationError(
                f"{component}.{name} is {dtype}, which does not move between host and device; "
                f"allowed: {', '.join(ITEM_BYTES)}; keep its block resident, or use --offload none"
            )


def _check_unshared(component: str, module: nn.Module, paths: Sequence[str]) -> None:
    owners: dict[int, str] = {}
    for path in paths:
        block = module.get_submodule(path)
        for tensor in (*block.parameters(), *block.buffers()):
            owners.setdefault(id(tensor), path)
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        owner = owners.get(id(tensor))
        if owner is not None and not name.startswith(f"{owner}."):
            raise UnsupportedCombinationError(
                f"{component}.{name} is a tensor of the block {owner} too, so that block cannot "
                "stream; keep it resident, or use --offload none or model"
            )
