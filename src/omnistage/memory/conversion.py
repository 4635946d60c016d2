"""Stored tensors that `transformers` makes into others (experts fused, projections split): planned
by running its own conversion on empty tensors, carried out by running it on those of the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.checkpoint import StoredTensor
from omnistage.memory.names import and_more

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One run of a library's converter. `parts` are its inputs, each with the pattern of the
    converter that its key matched; all are cast to `dtype` first. `first_name` is the name in the
    module that the keys were renamed to, `names` are those of all results. `on_host`: the library
    converts these on the host, whatever device they are for."""

    first_name: str
    names: tuple[str, ...]
    parts: tuple[tuple[str, StoredTensor], ...]
    dtype: str
    converter: Any
    on_host: bool = False

    def run(
        self, tensors: Iterable[torch.Tensor], module: torch.nn.Module
    ) -> dict[str, torch.Tensor]:
        """The results by name, made of the tensors of `parts`."""
        converter = deepcopy(self.converter)
        for (pattern, stored), tensor in zip(self.parts, tensors, strict=True):
            converter.add_tensor(self.first_name, stored.key, pattern, tensor)
        config = getattr(module, "config", None)
        made = converter.convert(self.first_name, model=module, config=config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
        }


@dataclass(frozen=True, kw_only=True)
class ConvertedKeys:
    """Keys that one converter takes for one name, in the library's order, with their patterns."""

    converter: Any
    keys: tuple[tuple[str, str], ...]


def plan_conversions(
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    converted: Mapping[str, ConvertedKeys],
    tensors: Mapping[str, StoredTensor],
    dtypes: Mapping[str, str],
) -> Iterator[tuple[Conversion, dict[str, tuple[int, ...]]]]:
    """Each conversion with its results' shapes. `tensors` are by key, `dtypes` by name.

    Raises `CheckpointError` when a conversion fails or makes what the module has no place for.
    """
    for name, entry in converted.items():
        parts = tuple((pattern, tensors[key]) for pattern, key in entry.keys)
        conversion = Conversion(
            first_name=name,
            names=(),
            parts=parts,
            dtype=dtypes[name],
            converter=entry.converter,
            on_host=entry.converter.force_cpu,
        )
        made = _shapes(conversion, module)
        _check(module, state, made, [stored.key for _, stored in parts])
        yield replace(conversion, names=tuple(made)), made


def _shapes(conversion: Conversion, module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    import torch

    dtype = getattr(torch, conversion.dtype)
    empty = [
        torch.empty(stored.shape, dtype=dtype, device="meta") for _, stored in conversion.parts
    ]
    try:
        made = conversion.run(empty, module)
    except Exception as error:  # the tensors are the user's: what an operation raises varies
        keys = and_more(stored.key for _, stored in conversion.parts)
        raise CheckpointError(
            f"{keys} cannot be made into {conversion.first_name} of a {type(module).__name__}: "
            f"{error}"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in made.items()}


def _check(
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    made: Mapping[str, tuple[int, ...]],
    keys: Sequence[str],
) -> None:
    wrong = [
        f"{name} {list(shape)}"
        + (f", needed {list(state[name].shape)}" if name in state else ", which it does not have")
        for name, shape in made.items()
        if name not in state or tuple(state[name].shape) != shape
    ]
    if wrong:
        raise CheckpointError(
            f"{and_more(keys)} do not fit a {type(module).__name__}: they make {'; '.join(wrong)}"
        )
