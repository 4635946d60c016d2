"""Joint attention gives what the unmodified transformer gives, for each sample as if alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omnistage.attention.joint import install_joint_attention
from tests.attention.qwen_blocks import alone, inputs, text_lengths, transformer

TOLERANCE = 1e-5
LENGTHS = (9, 3, 3, 7)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def original() -> Any:
    return transformer()


@pytest.fixture(scope="module")
def ours() -> Any:
    model = transformer()
    install_joint_attention(model)
    return model


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.abs().mean() > 0.05
    return float((found - expected).abs().max())


def each_alone(model: Any, given: dict[str, Any], lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([model(**alone(given, row, n))[0] for row, n in enumerate(lengths)])


@pytest.mark.invariant("ATTN-INV-003")
@pytest.mark.parametrize("lengths", [(5,), (5, 5, 5)])
def test_equal_lengths_give_what_the_library_gives(
    original: Any, ours: Any, lengths: tuple[int, ...]
) -> None:
    given = inputs(lengths)
    assert deviation(ours(**given)[0], original(**given)[0]) <= TOLERANCE


@pytest.mark.invariant("ATTN-INV-003")
@pytest.mark.parametrize("width", [9, 12])
def test_unequal_lengths_give_what_each_gives_alone(original: Any, ours: Any, width: int) -> None:
    given = inputs(LENGTHS, width=width)
    expected = each_alone(original, given, LENGTHS)
    assert deviation(ours(**given, **text_lengths(*LENGTHS))[0], expected) <= TOLERANCE


@pytest.mark.parametrize("wrong", [(8, 3, 3, 7), (9, 4, 3, 7)])
def test_a_wrong_length_is_seen(original: Any, ours: Any, wrong: tuple[int, ...]) -> None:
    given = inputs(LENGTHS)
    expected = each_alone(original, given, LENGTHS)
    assert deviation(ours(**given, **text_lengths(*wrong))[0], expected) > 100 * TOLERANCE
