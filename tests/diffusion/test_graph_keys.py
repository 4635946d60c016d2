"""Keys of captured graphs, and the copies of arguments that belong to them."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from omnistage.diffusion.graph_keys import NotCapturable, freeze, on_host, thaw

Pair = namedtuple("Pair", "image text")


def whole(tensor: torch.Tensor) -> bool:
    """Integers play the host's tensors, floats the device's."""
    return not tensor.is_floating_point()


def test_freezing_and_thawing_keep_order_and_kinds() -> None:
    a, b, host = torch.ones(1), torch.ones(2), torch.tensor([4])
    value = {"z": [a, (b, None)], "a": {"k": host}, "dtype": torch.float32}
    tensors: list[torch.Tensor] = []
    freeze(value, tensors, whole)
    new = [tensor + 1 for tensor in tensors]
    found = thaw(value, list(new), whole)
    assert list(found) == ["z", "a", "dtype"]
    assert found["z"][0] is new[0]
    assert found["z"][1] == (new[1], None)
    assert found["a"]["k"] is not host
    assert torch.equal(found["a"]["k"], host)
    assert found["z"] is not value["z"]
    with pytest.raises(NotCapturable):
        freeze({"x": {1, 2}}, [], whole)


def test_named_tuples_and_strides_survive() -> None:
    value = Pair(torch.ones(2, 3).t(), None)
    tensors: list[torch.Tensor] = []
    key = freeze(value, tensors, whole)
    assert key == freeze(Pair(torch.zeros(2, 3).t(), None), [], whole)
    assert key != freeze(Pair(torch.zeros(3, 2), None), [], whole)
    assert key != freeze((torch.zeros(2, 3).t(), None), [], whole)
    assert isinstance(thaw(value, tensors, whole), Pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_host_tensors_count_by_value(dtype: torch.dtype) -> None:
    one, same, other = (torch.tensor(x).to(dtype) for x in ([[1, 0]], [[1, 0]], [[0, 1]]))
    assert on_host(one)
    assert freeze(one, []) == freeze(same, []) != freeze(other, [])
    assert freeze(one.t(), []) != freeze(one, [])
