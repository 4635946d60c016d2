"""Kernels for few tokens against plain torch: interpreted here, compiled on a card."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.ar.kernel_cases import SMALL_EXPERTS, SMALL_LINEARS, compare_experts, compare_linear
from tests.interpreted import cases_agree

needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_do_what_torch_does() -> None:
    assert (
        cases_agree("tests.ar.kernel_cases")
        == f"{len(SMALL_EXPERTS) + len(SMALL_LINEARS)} cases agree\n"
    )


@pytest.mark.gpu
@needs_a_card
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_experts_on_a_card(tokens: int) -> None:
    compare_experts(tokens, 32, 8, 256, 192, "cuda", torch.bfloat16)


@pytest.mark.gpu
@needs_a_card
@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 12288), (70000, 1024)])
def test_one_row_linear_on_a_card(columns: int, depth: int) -> None:
    compare_linear(columns, depth, False, "cuda", torch.bfloat16)
