"""Steps whose decode rows run apart from their chunks, as where decode steps are captured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omnistage.ar.executor import TokenExecutor
from omnistage.ar.step_input import ALL_ALLOWED
from omnistage.ar.step_runner import StepRunner
from tests.ar.hand_plans import HandPlans, token_stage
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
