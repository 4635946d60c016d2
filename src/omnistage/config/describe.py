"""The resolved configuration in words, for `omnistage plan` and the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from omnistage.config.deploy import DeployConfig
from omnistage.config.overrides import Overrides
from omnistage.config.pipeline import ENTRY, PipelineConfig
from omnistage.config.resolved import OmniConfig, ParallelConfig, ResolvedStage
from omnistage.config.settings import deployment_settings, stage_settings

_DETAILS = (
    ("dtype", "quantization_config", "enforce_eager"),
    ("memory", "memory_budget_gib", "offload", "dlo_use_allgather", "dlo_resident_layers"),
    ("dlo_runtime_cache", "dlo_runtime_cache_pin_limit_gib"),
    ("weight_cache_dir", "weight_cache_limit_gib"),
    ("max_num_seqs", "output_window", "connector", "shm_threshold_bytes"),
    ("step_execution", "request_batch_max_wait_ms", "diffusion_streaming_output"),
    ("max_num_batched_tokens", "max_model_len", "enable_chunked_prefill", "async_chunk"),
    ("kv_cache_gib", "gpu_memory_utilization", "block_size", "enable_prefix_caching"),
    ("fuse_layers", "async_scheduling"),
    ("init_timeout_s", "heartbeat_timeout_s"),
)


def describe(config: OmniConfig) -> str:
    """Every resolved value, a few lines a stage."""
    return "\n".join(_lines(config))


def describe_origins(
    pipeline: PipelineConfig, deploy: DeployConfig | None, overrides: Overrides | None
) -> str:
    """Each value that is not a plain default, with the layer it came from; empty if there is none.

    A mapping merged from several layers is listed under the highest that touched it.
    """
    layers = [layer for layer in (deploy, overrides) if layer is not None]
    lines = [
        f"{name} = {setting.value!r}   ({setting.origin})"
        for name, setting in deployment_settings(layers).items()
    ]
    for stage in pipeline.stages:
        lines += [
            f"stage {stage.stage_id}: {name} = {setting.value!r}   ({setting.origin})"
            for name, setting in stage_settings(pipeline, layers, stage.stage_id).items()
        ]
    return "\n".join(lines)


def _lines(config: OmniConfig) -> Iterator[str]:
    count = len(config.stages)
    yield f"model      {config.model}"
    yield f"  path     {config.model_path}"
    yield f"  served   as {config.served_model_name!r}"
    yield (
        f"pipeline   {config.pipeline.model_type}{_classes(config.pipeline)}, "
        f"{count} stage{'s' if count > 1 else ''}"
    )
    for stage in config.stages:
        yield from _stage_lines(stage)
    yield f"limits     {_pairs(config.limits)}"
    yield f"lb_policy  {config.lb_policy}; log_level {config.log_level}; log_json {config.log_json}"


def _classes(pipeline: PipelineConfig) -> str:
    """The library's classes that the model consists of, where the model's folder names them."""
    names = pipeline.hf_architectures or (pipeline.diffusers_class_name,)
    return "".join(f" ({name})" for name in names if name)


def _stage_lines(stage: ResolvedStage) -> Iterator[str]:
    topology = stage.stage
    sources = ", ".join(
        "the request" if source == ENTRY else f"stage {source}" for source in topology.input_sources
    )
    goal = "to the client" if topology.final_output else "to the next stage"
    yield (
        f"stage {stage.stage_id}    {stage.name}: {topology.execution_type.value}, from {sources}, "
        f"{topology.output_modality.value} {goal}"
    )
    yield f"  runtime  {topology.runtime}"
    yield f"  process  {stage.process}; {_copies(stage)} on {', '.join(stage.devices)}"
    for names in _DETAILS:
        yield "  " + ", ".join(f"{name} {_word(getattr(stage, name))}" for name in names)
    yield f"  restart  {_pairs(stage.restart)}"
    yield f"  operation_limits_s  {_mapping(stage.operation_limits_s)}"
    if stage.default_sampling_params:
        yield f"  default_sampling_params  {_mapping(stage.default_sampling_params)}"
    if stage.options:
        yield f"  options  {_mapping(stage.options)}"


def _copies(stage: ResolvedStage) -> str:
    ranks = stage.parallel.world_size
    text = f"{stage.num_replicas} replica(s) of {ranks} rank(s)"
    sizes = [
        f"{f.name} {getattr(stage.parallel, f.name)}"
        for f in fields(ParallelConfig)
        if getattr(stage.parallel, f.name) != f.default
    ]
    return f"{text} ({', '.join(sizes)})" if sizes else text


def _pairs(values: Any) -> str:
    return ", ".join(f"{f.name} {_word(getattr(values, f.name))}" for f in fields(values))


def _mapping(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_word(value)}" for name, value in values.items())


def _word(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:g}" if isinstance(value, float) else str(value)
