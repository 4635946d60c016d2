"""What a deployment may set on a token stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omnistage.ar.options import read_token_options
from omnistage.ar.runtime import TokenRuntime
from omnistage.ar.scheduler import TokenScheduler
from omnistage.config.resolved import ParallelConfig, ResolvedStage
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from tests.config.pipelines import resolve, token_pipeline

OPTIONS = {"token_model": "some.module:build"}


def stage(options: dict[str, Any] | None = None, **settings: Any) -> ResolvedStage:
    chosen = {**OPTIONS, **(options or {})}
    return resolve(token_pipeline(), options=chosen, **settings).stages[0]


def test_keys_and_options_are_read() -> None:
    options = read_token_options(
        stage({"feeds_stages": True, "model": {"x": 1}}, max_model_len=64, kv_cache_gib=2.0)
    )
    assert options.token_model == "some.module:build"
    assert options.feeds_stages
    assert not options.emits_payload
    assert (options.max_model_len, options.kv_cache_gib, options.max_num_seqs) == (64, 2.0, 16)
    assert options.model == {"x": 1}
    assert options.entry
    assert options.output_modality == "text"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_modle": "x"}, "did you mean 'token_model'"),
        ({"feeds_stages": "yes"}, "must be true or false, got 'yes'"),
        ({"max_queued_requests": 0}, "must be a positive integer, got 0"),
        ({"max_queued_requests": True}, "must be a positive integer, got True"),
        ({"emits_payload": True}, "emits_payload needs feeds_stages"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_token_options(stage(options))
    assert words in str(caught.value)


def test_the_model_has_to_be_named() -> None:
    with pytest.raises(ConfigurationError, match="token_model is missing"):
        read_token_options(resolve(token_pipeline()).stages[0])


def test_every_running_request_must_be_able_to_decode_in_one_step() -> None:
    with pytest.raises(UnsupportedCombinationError, match="less than max_num_seqs 16"):
        read_token_options(stage(max_num_batched_tokens=8))


def test_the_runtime_refuses_before_anything_is_loaded() -> None:
    assert isinstance(TokenRuntime.scheduler(stage()), TokenScheduler)
    two_ranks = replace(stage(), parallel=ParallelConfig(tensor_parallel_size=2))
    for make in (TokenRuntime.scheduler, lambda one: TokenRuntime.executor(one, 0, 1)):
        with pytest.raises(UnsupportedCombinationError, match="not there yet"):
            make(two_ranks)


@pytest.mark.parametrize("given", [{}, {"stage_overrides": {0: {"offload": "layerwise"}}}])
def test_weights_of_a_token_stage_are_not_offloaded(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="offload is for diffusion stages"):
        stage(**given or {"offload": "layerwise"})
