"""Whether what a checkpoint stores fits what a module needs, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from omnistage.memory.checkpoint import StoredTensor
from omnistage.memory.names import and_more, with_nearest

if TYPE_CHECKING:
    import torch


def find_problems(
    state: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredTensor],
    provided: Collection[str],
) -> list[str]:
    """One phrase a kind of problem, each naming keys: missing, unexpected, shape, dtype.

    `state` are the module's tensors by name, `stored` the checkpoint's by name as renamed for the
    module, `provided` the names that something provides.
    """
    missing = [name for name in state if name not in provided]
    unexpected = [tensor.key for name, tensor in stored.items() if name not in state]
    both = {name: (stored[name], tensor) for name, tensor in state.items() if name in stored}
    shapes = [
        f"{name} (stored {list(has.shape)}, needed {list(needs.shape)})"
        for name, (has, needs) in both.items()
        if has.shape != tuple(needs.shape)
    ]
    dtypes = [
        f"{name} (stored {has.dtype}, allowed any {_kind(dtype_name(needs.dtype))})"
        for name, (has, needs) in both.items()
        if _kind(has.dtype) != _kind(dtype_name(needs.dtype))
    ]
    found = {
        "missing": with_nearest(missing, unexpected),
        "unexpected": with_nearest(unexpected, missing),
        "of another shape": and_more(shapes),
        "of another kind of number": and_more(dtypes),
    }
    return [f"{what}: {names}" for what, names in found.items() if names]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(dtype: str) -> str:
    """Within a kind a cast keeps meaning; between kinds it loses fractions or signs."""
    for kind in ("float", "complex", "bool"):
        if kind in dtype:
            return kind
    return "int"
