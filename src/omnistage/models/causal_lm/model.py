"""Loads a causal language model for the token runtime: its module on paged attention, its words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.ar.causal_lm import CausalLM
from omnistage.ar.prompt import PreparedPrompt
from omnistage.ar.tokenizer import load_tokenizer, prepare_text
from omnistage.attention.paged import NAME, register
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.memory.budget import MemoryBudget
from omnistage.memory.causal_lm import plan_causal_lm
from omnistage.memory.transformers_loader import load_planned

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.runtime import LoadReporter
    from omnistage.memory.plan import LoadPlan


class TextModel(CausalLM):
    """Takes prompts, chats and token ids."""

    def prepare(self, data: StageData, params: OmniTokenSamplingParams) -> PreparedPrompt:
        ids = prepare_text(
            data,
            self.tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )
        return PreparedPrompt(token_ids=ids)


def build(stage: ResolvedStage, device: str, report: LoadReporter) -> TextModel:
    """The model of a stage, a folder or a GGUF file. Raises `CheckpointError` naming what is wrong
    with it, and `ConfigurationError` where its weights exceed the stage's budget."""
    report("loading tokenizer", None)
    tokenizer = load_tokenizer(Path(stage.model_path))
    model = TextModel(load_planned(plan(stage, device), report), tokenizer=tokenizer)
    if stage.max_model_len is not None:
        model.max_model_len = min(model.max_model_len, stage.max_model_len)
    return model


def plan(stage: ResolvedStage, device: str) -> LoadPlan:
    """What `build` loads, from configurations and headers."""
    register()
    planned = plan_causal_lm(
        Path(stage.model_path), dtype=stage.dtype, device=device, attn_implementation=NAME
    )
    budget = MemoryBudget.of(stage.memory_budget_gib, device)
    budget.check(planned.bytes_by_device, what=planned.cls.__name__)
    return planned
