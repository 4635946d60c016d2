"""The executor under hand-made plans: greedy tokens are those of `transformers.generate`."""

from __future__ import annotations

import pytest
import torch

from omnistage.ar.executor import TokenExecutor
from tests.ar.hand_plans import HandPlanned, token_stage
from tests.ar.tiny_models import VOCAB_SIZE, qwen3

NEW_TOKENS = 12


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def generated(ids: list[int], count: int = NEW_TOKENS) -> list[int]:
    result = qwen3().generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    return result[0, len(ids) :].tolist()


@pytest.fixture(params=[0, 1], ids=["lag-0", "lag-1"])
def planned(request) -> HandPlanned:
    return HandPlanned(TokenExecutor(token_stage(), 0, 1, lag=request.param))


def test_greedy_tokens_are_those_of_generate(planned):
    """Prompts whole and in chunks at odd places, joining while others decode."""
    prompts = {"a": prompt(21, 1), "b": prompt(5, 2), "c": prompt(38, 3)}
    a, b, c = (planned.start(name, ids) for name, ids in prompts.items())
    row = planned.row
    planned.step(row("a", 0, 21, **a), row("b", 0, 3, False, **b))
    planned.step(row("a", 21, 1), row("b", 3, 2, decodes=False), row("c", 0, 17, False, **c))
    planned.step(row("a", 22, 1), row("b", 5, 1), row("c", 17, 20, False, decodes=False))
    planned.step(row("a", 23, 1), row("b", 6, 1), row("c", 37, 1, decodes=False))
    for index in range(NEW_TOKENS):
        planned.step(row("a", 24 + index, 1), row("b", 7 + index, 1), row("c", 38 + index, 1))
    planned.collect()
    for name, ids in prompts.items():
        expected = generated(ids)
        assert len(set(expected)) > 4
        assert planned.tokens[name][:NEW_TOKENS] == expected
