"""Precedence of the layers, and completeness of what they resolve to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omnistage.config.resolved import EngineLimits, ResolvedStage
from omnistage.config.schema import DEPLOYMENT_KEYS, LIMIT_KEYS, STAGE_KEYS
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from tests.config.pipelines import diffusion_pipeline, resolve, token_pipeline, two_stage_pipeline

YAML_ALL = "max_num_seqs: 2"
YAML_ONE = "max_num_seqs: 2\nstages: [{stage_id: 1, max_num_seqs: 3}]"


@pytest.mark.invariant("CONFIG-INV-100")
@pytest.mark.parametrize(
    ("yaml", "overrides", "expected"),
    [
        (None, {}, (16, 1)),
        (YAML_ALL, {}, (2, 2)),
        (YAML_ONE, {}, (2, 3)),
        (YAML_ONE, {"max_num_seqs": 4}, (4, 4)),
        (YAML_ONE, {"max_num_seqs": 4, "stage_overrides": {1: {"max_num_seqs": 5}}}, (4, 5)),
        (YAML_ONE, {"stage_overrides": {0: {"max_num_seqs": 5}}}, (5, 3)),
    ],
)
def test_per_stage_beats_global_beats_yaml_beats_default(
    yaml: str | None, overrides: dict[str, Any], expected: tuple[int, int]
) -> None:
    config = resolve(two_stage_pipeline(), yaml=yaml, **overrides)
    assert tuple(stage.max_num_seqs for stage in config.stages) == expected


@pytest.mark.invariant("CONFIG-INV-100")
def test_mappings_are_merged_key_by_key() -> None:
    pipeline = diffusion_pipeline(
        default_sampling_params={0: {"num_inference_steps": 8, "guidance_scale": 1.0}},
        options={0: {"a": {"x": 1, "y": 2}, "b": 3}},
    )
    (stage,) = resolve(
        pipeline,
        yaml="default_sampling_params: {guidance_scale: 2.5}\noptions: {a: {y: 5}}",
        default_sampling_params={"height": 64},
        operation_limits={"step": 7},
        restart={"max_restarts": 0},
    ).stages
    assert stage.default_sampling_params == {
        "num_inference_steps": 8,
        "guidance_scale": 2.5,
        "height": 64,
    }
    assert stage.options == {"a": {"x": 1, "y": 5}, "b": 3}
    assert stage.operation_limits_s["step"] == 7.0
    assert stage.operation_limits_s["decode"] == 120.0
    assert stage.restart.max_restarts == 0
    assert stage.restart.window_s == 300.0


@pytest.mark.invariant("CONFIG-INV-100")
def test_a_device_given_above_replaces_devices_given_below() -> None:
    yaml = "stages: [{stage_id: 0, devices: ['cuda:1']}]"
    gpus = ("cuda:0", "cuda:1")
    assert resolve(yaml=yaml, accelerators=gpus).stages[0].devices == ("cuda:1",)
    assert resolve(yaml=yaml, accelerators=gpus, device="cpu").stages[0].devices == ("cpu",)
    assert resolve(yaml="device: cpu", accelerators=gpus, devices=[1]).stages[0].devices == (
        "cuda:1",
    )


TOKEN_SAMPLES: dict[str, tuple[Any, str, Any]] = {
    "max_num_batched_tokens": (64, "max_num_batched_tokens", 64),
    "max_model_len": (128, "max_model_len", 128),
    "gpu_memory_utilization": (0.5, "gpu_memory_utilization", 0.5),
    "kv_cache_gib": (2, "kv_cache_gib", 2.0),
    "block_size": (8, "block_size", 8),
    "enable_prefix_caching": (False, "enable_prefix_caching", False),
    "enable_chunked_prefill": (False, "enable_chunked_prefill", False),
    "async_chunk": (False, "async_chunk", False),
    "fuse_layers": (False, "fuse_layers", False),
    "async_scheduling": (False, "async_scheduling", False),
}

SAMPLES: dict[str, tuple[Any, str, Any]] = {
    **TOKEN_SAMPLES,
    "device": ("cuda", "devices", ("cuda:0",)),
    "devices": (["cuda:1"], "devices", ("cuda:1",)),
    "num_replicas": (2, "num_replicas", 2),
    "process": ("shared", "process", "shared"),
    "dtype": ("bfloat16", "dtype", "bfloat16"),
    "max_num_seqs": (7, "max_num_seqs", 7),
    "output_window": (3, "output_window", 3),
    "connector": ("inline", "connector", "inline"),
    "shm_threshold_bytes": (0, "shm_threshold_bytes", 0),
    "memory_budget_gib": (1.5, "memory_budget_gib", 1.5),
    "memory": ("minimal", "memory", "minimal"),
    "offload": ("layerwise", "offload", "layerwise"),
    "enable_cpu_offload": (True, "offload", "model"),
    "enable_layerwise_offload": (True, "offload", "layerwise"),
    "enable_distributed_layerwise_offload": (True, "offload", "distributed-layerwise"),
    "dlo_use_allgather": (False, "dlo_use_allgather", False),
    "dlo_resident_layers": (3, "dlo_resident_layers", 3),
    "dlo_runtime_cache": ("on", "dlo_runtime_cache", "on"),
    "dlo_runtime_cache_pin_limit_gib": (0, "dlo_runtime_cache_pin_limit_gib", 0.0),
    "weight_cache_dir": ("weights", "weight_cache_dir", "weights"),
    "weight_cache_limit_gib": (8, "weight_cache_limit_gib", 8.0),
    "quantization_config": ("fp8", "quantization_config", "fp8"),
    "enforce_eager": (True, "enforce_eager", True),
    "step_execution": (True, "step_execution", True),
    "request_batch_max_wait_ms": (20, "request_batch_max_wait_ms", 20.0),
    "diffusion_streaming_output": (True, "diffusion_streaming_output", True),
    "init_timeout": (9, "init_timeout_s", 9.0),
    "heartbeat_timeout": (2.5, "heartbeat_timeout_s", 2.5),
    "operation_limits": ({"step": 1}, "operation_limits_s.step", 1.0),
    "restart": ({"backoff_s": 2}, "restart.backoff_s", 2.0),
    "default_sampling_params": ({"height": 64}, "default_sampling_params.height", 64),
    "options": ({"custom": [1, 2]}, "options.custom", [1, 2]),
    **{
        f"{kind}_parallel_size": (2, f"parallel.{kind}_parallel_size", 2)
        for kind in (
            *("tensor", "sequence", "ring", "data", "pipeline", "cfg", "rank"),
            *("expert", "vae_patch"),
        )
    },
    "use_hsdp": (True, "parallel.use_hsdp", True),
    "hsdp_shard_size": (2, "parallel.hsdp_shard_size", 2),
    "hsdp_replicate_size": (2, "parallel.hsdp_replicate_size", 2),
}


def reach(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.invariant("CONFIG-INV-101")
@pytest.mark.parametrize("key", STAGE_KEYS)
def test_every_stage_key_reaches_the_resolved_stage(key: str) -> None:
    value, path, expected = SAMPLES[key]
    gpus = tuple(f"cuda:{index}" for index in range(4))
    base = {"device": "cpu"} if key not in ("device", "devices") else {}
    pipeline = token_pipeline() if key in TOKEN_SAMPLES else diffusion_pipeline()
    (before,) = resolve(pipeline, accelerators=(), **base).stages
    (after,) = resolve(pipeline, accelerators=gpus, **base, **{key: value}).stages
    assert reach(after, path) == expected
    if "." not in path or path.split(".")[0] in ("restart", "parallel"):
        assert reach(before, path) != expected


@pytest.mark.invariant("CONFIG-INV-101")
@pytest.mark.parametrize("key", LIMIT_KEYS)
def test_every_limit_reaches_the_engine(key: str) -> None:
    assert reach(EngineLimits(), key) != 3
    assert reach(resolve(limits={key: 3}).limits, key) == 3
    assert reach(resolve(**{key: 3}).limits, key) == 3


@pytest.mark.invariant("CONFIG-INV-101")
def test_deployment_keys_reach_the_configuration() -> None:
    config = resolve(
        yaml="schema_version: 1\npipeline: one_stage",
        served_model_name="mine",
        lb_policy="random",
        log_level="debug",
        log_json=True,
        limits={"stream_buffer": 9},
    )
    assert config.served_model_name == "mine"
    assert config.lb_policy == "random"
    assert config.log_level == "debug"
    assert config.log_json is True
    assert config.limits.stream_buffer == 9
    assert set(DEPLOYMENT_KEYS) == {
        "schema_version",
        "pipeline",
        "served_model_name",
        "lb_policy",
        "log_level",
        "log_json",
        "limits",
    }


def test_defaults_without_any_layer() -> None:
    config = resolve(two_stage_pipeline())
    assert config.served_model_name == "some/model"
    assert config.limits == EngineLimits()
    expected = [
        ResolvedStage(
            stage=stage,
            model_path="/models/some",
            process=f"stage-{stage.stage_id}",
            max_num_seqs=(16, 1)[stage.stage_id],
        )
        for stage in config.pipeline.stages
    ]
    assert list(config.stages) == expected


def test_separate_and_inline_name_processes() -> None:
    config = resolve(
        two_stage_pipeline(), process="inline", stage_overrides={1: {"process": "separate"}}
    )
    assert [stage.process for stage in config.stages] == ["inline", "stage-1"]


def test_sampling_defaults_by_stage_id() -> None:
    config = resolve(
        two_stage_pipeline(),
        yaml="default_sampling_params: {0: {max_tokens: 5}, 1: {height: 64}}",
        default_sampling_params={"1": {"width": 32}},
    )
    assert config.stages[0].default_sampling_params == {"max_tokens": 5}
    assert config.stages[1].default_sampling_params == {"height": 64, "width": 32}


@pytest.mark.invariant("CONFIG-INV-101")
def test_devices_of_each_replica() -> None:
    gpus = tuple(f"cuda:{index}" for index in range(4))
    (stage,) = resolve(accelerators=gpus, tensor_parallel_size=2, num_replicas=2).stages
    assert stage.devices == gpus
    assert stage.for_replica(0).devices == ("cuda:0", "cuda:1")
    assert stage.for_replica(1).devices == ("cuda:2", "cuda:3")
    (shared,) = resolve(
        accelerators=gpus, tensor_parallel_size=2, num_replicas=2, devices="0,1"
    ).stages
    assert shared.for_replica(1).devices == ("cuda:0", "cuda:1")
    assert shared.for_replica(1) == replace(shared, devices=("cuda:0", "cuda:1"))


def test_input_is_not_kept_by_reference() -> None:
    options = {"a": [1]}
    config = resolve(options=options)
    options["a"].append(2)
    assert config.stages[0].options == {"a": [1]}


def test_model_defaults_for_a_stage_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="model's defaults names stage 1"):
        resolve(diffusion_pipeline(options={1: {"a": 1}}))


@pytest.mark.parametrize("file", [None, "offload: auto", "offload: layerwise"])
def test_a_switch_decides_what_is_left_open(file: str | None) -> None:
    (stage,) = resolve(yaml=file, enable_layerwise_offload=True).stages
    assert stage.offload == "layerwise"


def test_of_several_switches_the_most_distributed_one_holds() -> None:
    switches = {"enable_cpu_offload": True, "enable_distributed_layerwise_offload": True}
    assert resolve(**switches).stages[0].offload == "distributed-layerwise"
    assert resolve(enable_cpu_offload=False).stages[0].offload == "auto"


def test_a_switch_against_another_strategy_is_refused() -> None:
    with pytest.raises(UnsupportedCombinationError, match="but offload is 'none'"):
        resolve(yaml="offload: none", enable_cpu_offload=True)


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_words_that_yaml_takes_for_booleans_mean_the_same_everywhere(word: str) -> None:
    from_file = resolve(yaml=f"dlo_runtime_cache: {word}\n").stages[0]
    from_flag = resolve(flags=[("dlo_runtime_cache", word)]).stages[0]
    assert from_file.dlo_runtime_cache == from_flag.dlo_runtime_cache == word
