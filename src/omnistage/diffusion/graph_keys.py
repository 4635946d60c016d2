"""Which calls are the same to a captured graph, and how its own arguments are made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MAX_VALUE_BYTES = 4096
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class NotCapturable(Exception):
    """An argument that no graph can be looked up by."""


def on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def freeze(
    value: Any,
    device_tensors: list[torch.Tensor],
    by_value: Callable[[torch.Tensor], bool] = on_host,
) -> Hashable:
    """What a graph is looked up by: equal when only the contents of device tensors differ.

    Device tensors count by shape, strides and dtype, and are appended to `device_tensors` in the
    order of `thaw`; those that are `by_value` and everything else count by value. Raises
    `NotCapturable` for a host tensor of over 4 KiB and for values of unknown kinds.
    """
    import torch

    if isinstance(value, torch.Tensor):
        if by_value(value):
            return _content(value)
        device_tensors.append(value)
        return ("device", value.shape, value.stride(), value.dtype, str(value.device))
    if isinstance(value, Mapping):
        items = sorted(value.items())
        return (
            "mapping",
            *((name, freeze(item, device_tensors, by_value)) for name, item in items),
        )
    if isinstance(value, list | tuple):
        return (type(value), *(freeze(item, device_tensors, by_value) for item in value))
    if isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
        return (type(value), value)
    raise NotCapturable(f"an argument holds a {type(value).__name__}")


def thaw(
    value: Any,
    device_tensors: list[torch.Tensor],
    by_value: Callable[[torch.Tensor], bool] = on_host,
) -> Any:
    """`value` with its device tensors replaced by `device_tensors`, which it empties from the
    front; containers are copies, so that nobody changes what a graph was captured with."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone() if by_value(value) else device_tensors.pop(0)
    if isinstance(value, Mapping):
        copied = {n: thaw(item, device_tensors, by_value) for n, item in sorted(value.items())}
        return {name: copied[name] for name in value}
    if isinstance(value, list | tuple):
        items = [thaw(item, device_tensors, by_value) for item in value]
        return items if isinstance(value, list) else _tuple_of(type(value), items)
    return value


def _tuple_of(kind: type[tuple[Any, ...]], items: list[Any]) -> tuple[Any, ...]:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _content(tensor: torch.Tensor) -> Hashable:
    import torch

    if tensor.nbytes > _MAX_VALUE_BYTES:
        raise NotCapturable(f"a host tensor of {tensor.nbytes} bytes is an argument")
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return ("host", tensor.shape, tensor.dtype, content)
