"""The paged decoding kernels against torch: in Triton's interpreter here, compiled on a card."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.attention.paged_cases import SMALL_CASES, Case, compare
from tests.interpreted import cases_agree

CARD_CASES = (
    *SMALL_CASES,
    Case(32, 8, 128, 128, splits=2, lengths=(1024, 17, 333), dtype=torch.bfloat16),
    Case(32, 8, 128, 128, splits=32, lengths=(5000,), dtype=torch.bfloat16),
    Case(16, 2, 128, 128, window=100, splits=4, lengths=(1, 99, 700), dtype=torch.bfloat16),
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_do_what_torch_does() -> None:
    assert cases_agree("tests.attention.paged_cases") == f"{len(SMALL_CASES)} cases agree\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CARD_CASES, ids=str)
def test_the_compiled_kernels_do_what_torch_does(case: Case) -> None:
    compare(case, "cuda")
