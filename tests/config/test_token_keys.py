"""Keys that only some kinds of stages have: where they apply, where they are refused."""

from __future__ import annotations

import pytest

from omnistage.config.pipeline import ExecutionType
from omnistage.config.schema import STAGE_KEYS, TOKEN_KEYS
from omnistage.contracts.errors import ConfigurationError
from tests.config.pipelines import diffusion_pipeline, resolve, token_pipeline, two_stage_pipeline


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [
        (ExecutionType.LLM_AR, "cpu", 16),
        (ExecutionType.LLM_AR, "cuda", 32),
        (ExecutionType.LLM_GENERATION, "cpu", 8),
        (ExecutionType.GENERIC, "cpu", 1),
    ],
)
def test_how_many_run_at_a_time_depends_on_the_kind(
    kind: ExecutionType, device: str, expected: int
) -> None:
    config = resolve(token_pipeline(kind), accelerators=("cuda:0",), device=device)
    assert config.stages[0].max_num_seqs == expected
    config = resolve(token_pipeline(kind), accelerators=("cuda:0",), max_num_seqs=3)
    assert config.stages[0].max_num_seqs == 3


def test_a_token_key_for_everything_is_for_token_stages() -> None:
    config = resolve(two_stage_pipeline(), max_model_len=64, step_execution=True)
    assert [stage.max_model_len for stage in config.stages] == [64, None]
    assert [stage.step_execution for stage in config.stages] == [False, True]


@pytest.mark.parametrize("key", [*TOKEN_KEYS, "async_chunk"])
def test_a_token_key_at_a_diffusion_stage_is_refused(key: str) -> None:
    value = True if STAGE_KEYS[key].type is bool else 1
    with pytest.raises(ConfigurationError, match=rf"{key} is for token .*stage 1 \(painter\)"):
        resolve(two_stage_pipeline(), stage_overrides={1: {key: value}})


def test_generation_stages_have_async_chunk_and_no_cache() -> None:
    pipeline = token_pipeline(ExecutionType.LLM_GENERATION)
    assert not resolve(pipeline, stage_overrides={0: {"async_chunk": False}}).stages[0].async_chunk
    with pytest.raises(ConfigurationError, match="kv_cache_gib is for token stages"):
        resolve(pipeline, stage_overrides={0: {"kv_cache_gib": 1.0}})


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("gpu-memory-utilization", "1.5", "gpu_memory_utilization is '1.5'; expected float <= 1"),
        ("max-model-len", "0", "max_model_len is '0'; expected int >= 1"),
        ("block-size", "4096", "block_size is '4096'; expected int <= 1024"),
        ("stage-0.max-num-batched-token", "1", "did you mean 'max_num_batched_tokens'"),
    ],
)
def test_wrong_values_name_the_limit(flag: str, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(token_pipeline(), flags=[(flag, text)])
    assert message in str(caught.value)


def test_no_bound_may_be_said_on_the_command_line() -> None:
    config = resolve(token_pipeline(), yaml="max_model_len: 9", flags=[("max-model-len", "null")])
    assert config.stages[0].max_model_len is None


def test_a_diffusion_pipeline_ignores_what_a_file_says_for_tokens() -> None:
    (stage,) = resolve(diffusion_pipeline(), yaml="kv_cache_gib: 2.0").stages
    assert stage.kv_cache_gib is None


@pytest.mark.invariant("CONFIG-INV-102")
def test_an_override_that_no_stage_can_use_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_cache_gib is for token stages, of which"):
        resolve(diffusion_pipeline(), kv_cache_gib=2.0)
