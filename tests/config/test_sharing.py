"""Token stages that share a GPU leave each other room."""

from __future__ import annotations

import pytest

from omnistage.config.overrides import Overrides
from omnistage.config.resolve import resolve_config
from omnistage.config.resolved import OmniConfig
from omnistage.config.sharing import SHARED_KV_CACHE_GIB
from omnistage.models.qwen3_omni.pipeline import pipeline_config


def resolved(accelerators: tuple[str, ...], **settings: object) -> OmniConfig:
    return resolve_config(
        pipeline_config({"enable_audio_output": True}),
        model="m",
        model_path="/m",
        served_model_name="m",
        overrides=Overrides.from_kwargs(**settings),
        accelerators=accelerators,
    )


def sizes(config: OmniConfig) -> list[float | None]:
    return [stage.kv_cache_gib for stage in config.stages]


def test_each_token_stage_of_one_gpu_gets_a_share() -> None:
    shared = SHARED_KV_CACHE_GIB
    assert sizes(resolved(("cuda:0",))) == [shared, shared, None]


@pytest.mark.parametrize("name", ["kv_cache_gib", "gpu_memory_utilization"])
def test_a_size_that_somebody_gave_stays(name: str) -> None:
    config = resolved(("cuda:0",), stage_overrides={0: {name: 0.5}})
    assert [getattr(stage, name) for stage in config.stages[:1]] == [0.5]
    assert config.stages[1].kv_cache_gib == SHARED_KV_CACHE_GIB
    assert config.stages[0].kv_cache_gib != SHARED_KV_CACHE_GIB


def test_stages_apart_and_stages_on_a_cpu_take_what_is_left() -> None:
    apart = {0: {"devices": "cuda:0"}, 1: {"devices": "cuda:1"}, 2: {"devices": "cuda:1"}}
    config = resolved(("cuda:0", "cuda:1"), stage_overrides=apart)
    assert sizes(config) == [None, SHARED_KV_CACHE_GIB, None]
    assert sizes(resolved(())) == [None, None, None]
