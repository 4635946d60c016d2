"""The draw's kernels against the eager path: in Triton's interpreter here, compiled on a card."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from omnistage.ar.sampling.sampler import Sampler
from tests.ar.sampling import draw_cases
from tests.ar.sampling.draw_cases import SMALL_CASES, Case
from tests.interpreted import cases_agree

CARD_CASES = (
    *SMALL_CASES,
    Case("random", rows=64, vocab_size=151_936),
    Case("random", rows=256, vocab_size=151_936, dtype=torch.bfloat16),
    Case("tied", rows=33, vocab_size=151_937, padding=3),
    Case("flat", rows=16, vocab_size=151_936),
    Case("peaked", rows=1, vocab_size=262_144),
)
on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@pytest.mark.invariant("AR-INV-210")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_draw_what_torch_draws() -> None:
    assert cases_agree("tests.ar.sampling.draw_cases") == f"{len(SMALL_CASES)} cases agree\n"


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("case", CARD_CASES, ids=str)
def test_the_compiled_kernels_draw_what_torch_draws(case: Case) -> None:
    draw_cases.compare(case, "cuda")


@pytest.mark.gpu
@on_a_card
def test_compiled_noise_ties_and_no_numbers() -> None:
    draw_cases.noise_is_that_of_torch("cuda")
    draw_cases.ties_go_to_the_lowest("cuda")
    draw_cases.no_numbers_leave_the_others("cuda")


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_is_the_processors(dtype: torch.dtype) -> None:
    """`Sampler.sample` replayed at other positions, rows and logits, against a CPU's tokens."""
    case = Case("random", rows=24, vocab_size=5003, dtype=dtype)
    here, rows, params = draw_cases.state_of(case, "cpu")
    there, _, _ = draw_cases.state_of(case, "cuda")
    features = draw_cases.features_of(params)
    logits, positions = draw_cases.logits_of(case), torch.arange(len(rows))
    inputs = [each.cuda() for each in (logits, rows, positions)]
    sampler = Sampler(there)
    sampler.sample(*inputs, features=features)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sampler.sample(*inputs, features=features)
    agreed = 0
    for step in range(20):
        moved = (logits.roll(step, 1), rows.roll(step), positions + 100 * step)
        for target, value in zip(inputs, moved, strict=True):
            target.copy_(value)
        graph.replay()
        expected = Sampler(here).sample(*moved, features=features)
        agreed += int((result.tokens.cpu() == expected.tokens).sum())
        assert result.finite.all()
    assert agreed >= 0.99 * 20 * len(rows)
