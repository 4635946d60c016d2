"""Tiny random models in memory, and the factory that token stages of these tests name."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from omnistage.ar.causal_lm import CausalLM
from omnistage.attention.paged import NAME, register
from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.runtime import LoadReporter

VOCAB_SIZE = 256
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEVIATION = 0.2
HEAD_DEVIATION = 1.0
"""Heads so loud that no two tokens are nearly as likely."""


@cache
def qwen3() -> PreTrainedModel:
    """The unmodified model: the reference of every parity test here."""
    return loud(Qwen3Config(**COMMON, tie_word_embeddings=False))


def loud(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim >= 2:
                deviation = HEAD_DEVIATION if "lm_head" in name else DEVIATION
                parameter.normal_(std=deviation, generator=generator)
    return module


def paged(reference: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a module that attends by pages."""
    register()
    config = copy.deepcopy(reference.config)
    module = type(reference)._from_config(config, attn_implementation=NAME).eval()
    module.load_state_dict(reference.state_dict())
    return module


def build_qwen3(stage: ResolvedStage, device: str, report: LoadReporter) -> CausalLM:
    return CausalLM(paged(qwen3()), tokenizer=None)
