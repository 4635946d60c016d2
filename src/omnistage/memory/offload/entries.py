"""Where calls come into a component: a pipeline does not only call its top module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def entry_points(module: nn.Module) -> Iterator[nn.Module]:
    """The module, and those with weights in it through which a pipeline may go in past its
    `forward`: all but what is in a list, which only the module itself calls."""
    from torch import nn

    if any(True for _ in module.parameters()):
        yield module
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        for child in module.children():
            if not isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield from entry_points(child)


def enter_by(module: nn.Module, before: Callable[..., None]) -> Callable[[], None]:
    """Call the hook in front of every call that comes in; returns what takes it off again."""
    handles = [
        entry.register_forward_pre_hook(before, prepend=True)
        for entry in dict.fromkeys(entry_points(module))
    ]

    def remove() -> None:
        while handles:
            handles.pop().remove()

    return remove
