"""Steps whose decode rows run apart from their chunks, as where decode steps are captured."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.ar.executor import TokenExecutor
from omnistage.ar.step_runner import StepRunner
from tests.ar.hand_plans import HandPlanned, token_stage
from tests.ar.test_greedy_parity import assert_generated, prompts, serve


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_tokens_are_those_of_whole_steps(family, monkeypatch):
    batch = list(prompts(family))[:8]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    _, tokens = serve(family, batch, **settings)
    parts = {"decodes": 0, "chunks": 0}
    init, decode, mixed = StepRunner.__init__, StepRunner._run_decodes, StepRunner._run_mixed

    def split(self, *arguments, **named):
        init(self, *arguments, **named)
        self.splits_mixed = True

    def count_decodes(self, *arguments):
        parts["decodes"] += 1
        return decode(self, *arguments)

    def count_chunks(self, decodes, *arguments):
        assert not decodes
        parts["chunks"] += 1
        return mixed(self, decodes, *arguments)

    monkeypatch.setattr(StepRunner, "__init__", split)
    monkeypatch.setattr(StepRunner, "_run_decodes", count_decodes)
    monkeypatch.setattr(StepRunner, "_run_mixed", count_chunks)
    _, tokens_apart = serve(family, batch, **settings)
    assert parts["decodes"] > 3
    assert parts["chunks"] > 3
    assert tokens_apart == tokens
    assert_generated(family, batch, tokens_apart)


def only(token, executor):
    """A grammar's mask that allows one token."""
    mask = np.zeros(-(-executor._parts.model.vocab_size // 32), dtype=np.int32)
    mask[token // 32] = 1 << token % 32
    return mask


def free_tokens(beside_grammars):
    """Of a sequence without a grammar: its first token and that of its first decode step."""
    planned = HandPlanned(TokenExecutor(token_stage(), 0, 1, lag=0))
    planned.executor._parts.runner.splits_mixed = True
    mask = only(5, planned.executor)
    if beside_grammars:
        planned.step(planned.row("old", 0, 3, **planned.start("old", [7, 8, 9]), bitmask=mask))
        planned.step(planned.row("old", 3, 1, bitmask=mask))
        assert planned.tokens["old"] == [5, 5]
    planned.step(planned.row("free", 0, 4, **planned.start("free", [1, 2, 3, 4])))
    rows = [planned.row("free", 4, 1)]
    if beside_grammars:
        rows.append(planned.row("new", 0, 3, **planned.start("new", [3, 2, 1]), bitmask=mask))
    planned.step(*rows)
    assert planned.tokens.get("new", [5]) == [5]
    return planned.tokens["free"]


def test_a_grammar_that_begins_beside_it_masks_no_other_row():
    alone = free_tokens(beside_grammars=False)
    assert alone[1] != 5
    assert free_tokens(beside_grammars=True) == alone
