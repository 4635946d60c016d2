"""Tensors as bytes: exact through numpy and torch, strict about dtype and size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omnistage.contracts.errors import InvalidRequestError, ProtocolError
from omnistage.contracts.tensors import ITEM_BYTES, HostTensor, host_tensor, total_bytes

NUMPY_DTYPES = [name for name in ITEM_BYTES if not name.startswith(("bfloat", "float8"))]
arrays = st.sampled_from(NUMPY_DTYPES).flatmap(
    lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and (left.tobytes() == right.tobytes())
    )


@pytest.mark.invariant("IO-INV-202")
@given(array=arrays)
@settings(max_examples=80, deadline=None)
def test_numpy_arrays_keep_every_bit(array: np.ndarray) -> None:
    tensor = host_tensor(array)
    assert tensor.nbytes == array.nbytes
    assert same_bits(tensor.numpy(), array)
    assert same_bits(tensor.torch().numpy(), array)


@pytest.mark.invariant("IO-INV-202")
@pytest.mark.parametrize("name", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_torch_tensors_keep_every_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    count = math.prod(shape)
    raw = torch.arange(max(1, count * ITEM_BYTES[name]), dtype=torch.uint8) % 2
    value = raw[: count * ITEM_BYTES[name]].view(dtype).reshape(shape)
    tensor = host_tensor(value)
    assert (tensor.dtype, tensor.shape) == (name, shape)
    again = tensor.torch()
    assert again.dtype == dtype
    assert again.shape == value.shape
    assert torch.equal(
        again.reshape(-1).view(torch.uint8), value.contiguous().reshape(-1).view(torch.uint8)
    )
    assert ITEM_BYTES[name] == dtype.itemsize


@pytest.mark.invariant("IO-INV-202")
def test_views_that_are_not_contiguous() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::-1]
    assert same_bits(host_tensor(array).numpy(), array)
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(host_tensor(tensor).torch(), tensor)


def test_the_torch_copy_is_private() -> None:
    array = np.zeros(3, dtype=np.float32)
    copy = host_tensor(array).torch()
    array[0] = 1
    assert copy[0] == 0


@pytest.mark.invariant("IO-INV-203")
@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "message"),
    [
        ("float31", (1,), 4, "unknown tensor dtype 'float31'"),
        ("float32", (-1,), 4, "negative dimension"),
        ("float32", (2, 2), 15, "needs 16 bytes, got 15"),
        ("int8", (), 0, "needs 1 bytes, got 0"),
        ("int8", (1 << 62, 4), 8, "needs"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(
    dtype: str, shape: tuple[int, ...], nbytes: int, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        HostTensor(dtype, shape, memoryview(bytes(nbytes)))


@pytest.mark.invariant("IO-INV-203")
@pytest.mark.parametrize("value", [[1, 2], "text", np.array(["a"]), np.array([object()]), None])
def test_what_is_no_tensor_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be sent|is neither"):
        host_tensor(value)


def test_numpy_refuses_what_it_cannot_hold() -> None:
    tensor = host_tensor(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(InvalidRequestError, match="numpy has no dtype bfloat16"):
        tensor.numpy()


def test_a_host_tensor_is_itself() -> None:
    tensor = host_tensor(np.zeros(4, dtype=np.uint8))
    assert host_tensor(tensor) is tensor
    assert total_bytes([tensor, tensor]) == 8
