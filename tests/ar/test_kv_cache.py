"""How large a cache is, and what is said when it does not fit."""

from __future__ import annotations

import pytest

from omnistage.ar.kv_cache import GIB, DeviceMemory, cache_bytes, plan_cache
from omnistage.ar.options import TokenOptions
from omnistage.contracts.errors import ConfigurationError
from tests.ar.driver import token_options


def options(**changes) -> TokenOptions:
    return token_options(**({"max_num_seqs": 4, "block_size": 16} | changes))


def plan(budget_bytes: int, *, model_limit: int = 4096, **changes):
    return plan_cache(
        options(**changes), bytes_per_token=100, model_limit=model_limit, budget_bytes=budget_bytes
    )


@pytest.mark.invariant("AR-INV-205")
def test_sequences_are_as_long_as_model_and_cache_allow():
    assert plan(10_000_000).max_model_len == 4096
    small = plan(160_000)
    assert (small.num_blocks, small.max_model_len) == (100, 99 * 16)
    assert plan(10_000_000, max_model_len=1000).max_model_len == 1000


@pytest.mark.invariant("AR-INV-205")
def test_no_more_blocks_than_could_be_used():
    assert plan(1_000_000_000).num_blocks == 2 * 4 * 256 + 1


@pytest.mark.invariant("AR-INV-205")
def test_a_length_that_does_not_fit_is_refused_with_what_would():
    with pytest.raises(ConfigurationError, match=r"holds 1584 tokens.*max_model_len to at most 15"):
        plan(160_000, max_model_len=2000)
    with pytest.raises(ConfigurationError, match="positions end at 4096"):
        plan(10_000_000, max_model_len=5000)
    with pytest.raises(ConfigurationError, match="less than one block"):
        plan(1_000)


@pytest.mark.invariant("AR-INV-205")
def test_a_gpus_cache_is_what_weights_and_a_step_leave():
    memory = DeviceMemory(
        total_bytes=100 * GIB, free_bytes=60 * GIB, weight_bytes=30 * GIB, step_bytes=5 * GIB
    )
    assert cache_bytes(options(), memory) == 53 * GIB
    assert cache_bytes(options(gpu_memory_utilization=0.5), memory) == 13 * GIB
    assert cache_bytes(options(kv_cache_gib=2), memory) == 2 * GIB
    assert cache_bytes(options(), None) == GIB
    with pytest.raises(ConfigurationError, match=r"raise it to more than 0\.37"):
        cache_bytes(options(gpu_memory_utilization=0.3), memory)
