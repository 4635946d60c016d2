"""Hooks of streamed blocks, and who owns which module. Hooks run outside a block's (perhaps
compiled) `forward`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.memory.offload.ring import BlockRing, RingBlock

if TYPE_CHECKING:
    from torch import nn

_owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By module: the strategy of the backend that has claimed it."""
_owners_lock = threading.Lock()


def claim(modules: Mapping[str, nn.Module], strategy: str) -> Callable[[], None]:
    """Make a backend the only owner of these components; returns what gives them back.

    Raises `ConfigurationError`, with nothing claimed, when one has an owner.
    """
    with _owners_lock:
        for name, module in modules.items():
            if module in _owners:
                raise ConfigurationError(
                    f"{name} is owned by offload {_owners[module]!r} already; disable that first"
                )
        for module in modules.values():
            _owners[module] = strategy
    claimed = [weakref.ref(module) for module in modules.values()]

    def give_back() -> None:
        with _owners_lock:
            for reference in claimed:
                if (module := reference()) is not None:
                    _owners.pop(module, None)

    return give_back


def stream_through(
    ring: BlockRing, module: nn.Module, blocks: Iterable[RingBlock]
) -> Callable[[], None]:
    """Have these blocks of `module` pass through the ring whenever they are called; returns what
    takes the hooks off again."""
    handles = []
    for block in blocks:
        part = module.get_submodule(block.path)
        before, after = _hooks(ring, block)
        handles.append(part.register_forward_pre_hook(before, prepend=True))
        handles.append(part.register_forward_hook(after, always_call=True))

    def remove() -> None:
        while handles:
            handles.pop().remove()

    return remove


def _hooks(ring: BlockRing, block: RingBlock) -> tuple[Callable[..., None], Callable[..., None]]:
    import torch

    trained = any(tensor.requires_grad for tensor in block.tensors)

    def before(module: nn.Module, args: Any) -> None:
        if trained and torch.is_grad_enabled():
            raise UnsupportedCombinationError(
                f"{block.path} is streamed and cannot be trained; call it under torch.no_grad()"
            )
        ring.enter(block)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        ring.leave(block, ahead=output is not None)

    return before, after


def watch_adapters(module: nn.Module, adopt: Callable[[], object]) -> Callable[[], None]:
    """Call `adopt` in front of the first pass after adapters (peft's `peft_config`) were added to a
    module or taken off it; returns what ends that."""
    known = _adapters(module)

    def before(module: nn.Module, args: Any) -> None:
        nonlocal known
        if (found := _adapters(module)) != known:
            adopt()
            known = found

    return module.register_forward_pre_hook(before, prepend=True).remove


def _adapters(module: nn.Module) -> tuple[tuple[str, int], ...]:
    configs = vars(module).get("peft_config") or {}
    return tuple((name, id(config)) for name, config in configs.items())
