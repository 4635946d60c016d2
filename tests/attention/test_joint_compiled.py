"""Compiled blocks hold joint attention as one operator, whatever the lengths are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from omnistage.attention.joint import install_joint_attention
from tests.attention.qwen_blocks import alone, inputs, text_lengths, transformer

MANY_LENGTHS = [(9, 3), (9, 9), (1, 9), (4, 7), (2, 2), (5, 8)]


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def compiled(backend: str, **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    model = transformer()
    install_joint_attention(model)
    counter = CompileCounterWithBackend(backend)
    for block in model.transformer_blocks:
        block.compile(fullgraph=True, backend=counter, **options)
    return model, counter


def assert_as_alone(model: Any, lengths: tuple[int, ...], width: int) -> None:
    original, given = transformer(), inputs(lengths, width=width)
    expected = torch.cat([original(**alone(given, row, n))[0] for row, n in enumerate(lengths)])
    assert expected.abs().mean() > 0.05
    found = model(**given, **text_lengths(*lengths))[0]
    assert (found - expected).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.invariant("ATTN-INV-007")
def test_one_compilation_serves_all_blocks_and_lengths() -> None:
    model, counter = compiled("inductor")
    for lengths in MANY_LENGTHS:
        assert_as_alone(model, lengths, width=9)
    assert counter.frame_count == 1


@pytest.mark.invariant("ATTN-INV-007")
def test_dynamic_compilation_serves_all_widths() -> None:
    """Dynamo compiles the first block by itself, since its inputs alone are views."""
    model, counter = compiled("aot_eager", dynamic=True)
    assert_as_alone(model, MANY_LENGTHS[0], width=10)
    compiled_at_first = counter.frame_count
    for lengths in MANY_LENGTHS:
        assert_as_alone(model, lengths, width=max(lengths) + 1)
    assert counter.frame_count == compiled_at_first > 0
