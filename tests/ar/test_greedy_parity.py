"""Scheduler and executor together: greedy tokens are those of the unmodified `generate`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ar.hand_plans import token_stage
from tests.ar.real_executor import real_driver
from tests.checkpoints import checkpoint

FAMILIES = ("qwen3", "qwen3-moe", "llama", "gemma3", "mistral", "phi")
BUILD = "omnistage.models.causal_lm.model:build"
NEW_TOKENS = 10
LENGTHS = (3, 50, 17, 1, 33, 8, 21, 64, 5, 40, 12, 29, 2, 16, 47, 11)


@cache
def reference(family: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32).eval()


@cache
def prompts(family: str) -> tuple[tuple[int, ...], ...]:
    """The second half begins as the first does: their prefixes are shared."""
    generator = torch.Generator().manual_seed(7)
    limit = reference(family).config.vocab_size
    base = torch.randint(4, limit, (max(LENGTHS),), generator=generator).tolist()
    made = []
    for index, length in enumerate(LENGTHS):
        own = torch.randint(4, limit, (length,), generator=generator).tolist()
        shared = length - 2 if index >= len(LENGTHS) // 2 else 0
        made.append((*base[: max(0, shared)], *own[max(0, shared) :]))
    return tuple(made)


@cache
def generated(family: str, ids: tuple[int, ...]) -> list[int]:
    result = reference(family).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return result[0, len(ids) :].tolist()


def serve(family: str, batch: list[tuple[int, ...]], *, lag: int = 0, **changes):
    stage = token_stage(BUILD, model_path=str(checkpoint(family)), dtype="float32", **changes)
    driver = real_driver(stage, lag=lag)
    heard = [
        driver.add(
            str(index),
            ids,
            max_tokens=NEW_TOKENS,
            min_tokens=NEW_TOKENS,
            temperature=0.0,
        )
        for index, ids in enumerate(batch)
    ]
    driver.run()
    assert [one.error for one in heard] == [None] * len(batch)
    driver.assert_nothing_held()
    return driver, [one.token_ids for one in heard]


def assert_generated(family: str, batch: list[tuple[int, ...]], found: list[list[int]]) -> None:
    expected = [generated(family, ids) for ids in batch]
    assert len({token for tokens in expected for token in tokens}) > NEW_TOKENS
    assert found == expected


@pytest.mark.invariant("AR-INV-201")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lag", [0, 1])
def test_sixteen_together_and_each_alone(family, lag):
    batch = list(prompts(family))
    driver, found = serve(family, batch, lag=lag, max_num_seqs=16)
    assert driver.executor.widest == 16
    assert_generated(family, batch, found)
    alone = [serve(family, [ids], lag=lag)[1][0] for ids in batch[1:3]]
    assert alone == found[1:3]


@pytest.mark.invariant("AR-INV-201")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_shared_prefixes_change_no_token(family, lag, caching, chunked):
    batch = list(prompts(family))
    changes = {"enable_prefix_caching": caching, "enable_chunked_prefill": chunked}
    budget = 24 if chunked else 128
    _, found = serve(
        family, batch, lag=lag, max_num_seqs=5, max_num_batched_tokens=budget, **changes
    )
    assert_generated(family, batch, found)


@pytest.mark.invariant("AR-INV-202")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_sequences_go_on_with_the_same_tokens(family, lag):
    """The cache holds far less than all sequences need."""
    batch = list(prompts(family))
    config = reference(family).config
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    block_bytes = 4 * 2 * heads * head_dim * layers * torch.float32.itemsize
    small = {"block_size": 4, "max_model_len": 80, "kv_cache_gib": 30.5 * block_bytes / (1 << 30)}
    driver, found = serve(family, batch, lag=lag, max_num_seqs=8, **small)
    assert driver.executor.restarts > 0
    assert_generated(family, batch, found)
