"""An operation as data: enough to time it again, and to recognise it in another process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnistage.memory.planning.times import ATTENTION

RMS_NORM = "rms_norm"
COMPOSED = {
    ATTENTION: torch.nn.functional.scaled_dot_product_attention,
    RMS_NORM: torch.nn.functional.rms_norm,
}
"""Operations that a GPU does in one kernel and other devices take to pieces."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Strides are in items, `dtype` is torch's name."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), tensor.stride(), dtype)

    def make(self, device: str) -> torch.Tensor:
        """One of this form. Numbers are small and finite; integers are 0, so that they are valid
        indices."""
        dtype = getattr(torch, self.dtype)
        made = torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
        if dtype.is_floating_point and dtype.itemsize > 1 and 0 not in self.strides:
            return made.normal_(std=0.1)
        return made.zero_()


@dataclass(frozen=True, slots=True)
class OpSignature:
    """What decides how long an operation takes. `kind` is "matmul", "attention", "convolution" or
    "pointwise" (all else: it takes as long as its bytes do). `call` is its arguments as JSON, with
    places for `tensors`; empty where they cannot be written so."""

    name: str
    kind: str
    call: str
    tensors: tuple[TensorForm, ...]
    flops: int
    nbytes: int

    @property
    def key(self) -> str:
        forms = ";".join(f"{one.shape}{one.strides}{one.dtype}" for one in self.tensors)
        return f"{self.name}|{self.call}|{forms}"

    def repeat(self, device: str) -> Any:
        """A function that does it once more, on tensors of its own. Raises `ValueError` where it
        cannot be repeated."""
        if not self.call:
            raise ValueError(f"{self.name} takes arguments that cannot be made again")
        tensors = [one.make(device) for one in self.tensors]
        args, kwargs = (_read(part, tensors, device) for part in json.loads(self.call))
        func = _function(self.name)
        return lambda: func(*args, **kwargs)


def written(args: Any, kwargs: Any) -> tuple[str, list[torch.Tensor]]:
    """The call of a signature and its tensors."""
    tensors: list[torch.Tensor] = []
    try:
        plain = [_plain(list(args), tensors), _plain(dict(kwargs), tensors)]
    except TypeError:
        return "", tensors
    return json.dumps(plain), tensors


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": True}
    if isinstance(value, list | tuple | torch.Size):
        return [_plain(one, tensors) for one in value]
    if isinstance(value, dict):
        return {"dict": {name: _plain(one, tensors) for name, one in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(type(value).__name__)


def _read(value: Any, tensors: Sequence[torch.Tensor], device: str) -> Any:
    if isinstance(value, list):
        return [_read(one, tensors, device) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "torch":
        return getattr(torch, inner)
    if kind == "device":
        return torch.device(device)
    return {name: _read(one, tensors, device) for name, one in inner.items()}


def _function(name: str) -> Any:
    if name in COMPOSED:
        return COMPOSED[name]
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
