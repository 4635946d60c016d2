"""Tensors as plain bytes with a dtype and a shape, readable by numpy and by torch.

Nothing here imports torch: the engine and the server handle tensors without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage.contracts.errors import InvalidRequestError, ProtocolError

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes an element takes, by torch's name of the dtype."""

NOT_IN_NUMPY = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A contiguous tensor in host memory: `buffer` holds `shape` elements of `dtype`, row-major.

    `owner` keeps whatever backs the buffer (a mapped segment, a torch tensor) alive.
    """

    dtype: str
    shape: tuple[int, ...]
    buffer: memoryview
    owner: Any = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ProtocolError(f"unknown tensor dtype {self.dtype!r}")
        if any(side < 0 for side in self.shape):
            raise ProtocolError(f"negative dimension in tensor shape {self.shape}")
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.buffer.nbytes != expected:
            raise ProtocolError(
                f"tensor of dtype {self.dtype} and shape {self.shape} needs {expected} bytes, "
                f"got {self.buffer.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def numpy(self) -> np.ndarray:
        """A read-only or shared view. bfloat16 and float8 have no numpy dtype: use `torch()`."""
        if self.dtype in NOT_IN_NUMPY:
            raise InvalidRequestError(f"numpy has no dtype {self.dtype}; ask for float32 output")
        return np.frombuffer(self.buffer, dtype=np.dtype(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """A private copy as a CPU tensor of the same dtype and shape."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=dtype)
        raw = torch.frombuffer(bytearray(self.buffer.cast("B")), dtype=torch.uint8)
        return raw.view(dtype).reshape(self.shape)


def host_tensor(value: Any) -> HostTensor:
    """Describe a numpy array, a torch tensor (copied off its device) or a `HostTensor`."""
    if isinstance(value, HostTensor):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.name not in ITEM_BYTES:
            raise InvalidRequestError(
                f"arrays of dtype {value.dtype} cannot be sent; allowed: {', '.join(ITEM_BYTES)}"
            )
        array = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
        shape = value.shape
        return HostTensor(value.dtype.name, tuple(shape), _flat_bytes(array), array)
    if type(value).__module__.split(".")[0] == "torch":
        return _from_torch(value)
    raise InvalidRequestError(f"{type(value).__name__} is neither a numpy array nor a torch tensor")


def _from_torch(value: torch.Tensor) -> HostTensor:
    import torch

    name = str(value.dtype).removeprefix("torch.")
    host = value.detach().to("cpu").contiguous()
    if host.numel() == 0:
        return HostTensor(name, tuple(host.shape), memoryview(b""))
    raw = host.reshape(-1).view(torch.uint8).numpy()
    return HostTensor(name, tuple(value.shape), memoryview(raw), host)


def _flat_bytes(array: np.ndarray) -> memoryview:
    if array.size == 0:
        return memoryview(b"")
    return array.reshape(-1).view(np.uint8).data


def total_bytes(tensors: Sequence[HostTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
