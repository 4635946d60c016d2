"""From layers to the one complete configuration. Nothing downstream adds a default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from omnistage.config.checks import suggestion
from omnistage.config.deploy import DeployConfig
from omnistage.config.devices import resolve_devices
from omnistage.config.layers import Layer
from omnistage.config.overrides import Overrides
from omnistage.config.pipeline import ExecutionType, PipelineConfig, StageConfig
from omnistage.config.resolved import (
    DEFAULT_OPERATION_LIMITS_S,
    INLINE_PROCESS,
    EngineLimits,
    OmniConfig,
    ParallelConfig,
    ResolvedStage,
    RestartPolicy,
)
from omnistage.config.schema import KEYS_OF_KINDS, OFFLOAD_FLAGS, PARALLEL_KEYS, STAGE_KEYS
from omnistage.config.settings import check_stage_ids, deployment_settings, stage_settings
from omnistage.config.sharing import share_gpus
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.contracts.sampling import (
    GenericParams,
    OmniDiffusionSamplingParams,
    OmniTokenSamplingParams,
    SamplingParams,
)
from omnistage.platforms.presence import visible_accelerators

SEPARATE_PROCESSES = "separate"
"""As a stage's `process`: a process of its own. The default."""

_PLAIN_STAGE_KEYS = tuple(
    name
    for name in STAGE_KEYS
    if name not in PARALLEL_KEYS
    and name not in ("device", "devices", "process", "restart", "operation_limits", *OFFLOAD_FLAGS)
)

PARAMS_BY_EXECUTION: dict[ExecutionType, type[SamplingParams]] = {
    ExecutionType.LLM_AR: OmniTokenSamplingParams,
    ExecutionType.LLM_GENERATION: GenericParams,
    ExecutionType.DIFFUSION: OmniDiffusionSamplingParams,
    ExecutionType.GENERIC: GenericParams,
}
"""What a request may ask of each kind of stage."""


def resolve_config(
    pipeline: PipelineConfig,
    *,
    model: str,
    model_path: str,
    served_model_name: str,
    deploy: DeployConfig | None = None,
    overrides: Overrides | None = None,
    accelerators: Sequence[str] | None = None,
) -> OmniConfig:
    """Resolve all layers once.

    `accelerators` are the GPUs to place on; None asks this machine. Raises `ConfigurationError` for
    values that cannot be and `UnsupportedCombinationError` for values that exclude each other.
    """
    layers: list[Layer] = [layer for layer in (deploy, overrides) if layer is not None]
    check_stage_ids(pipeline, layers)
    _refuse_keys_of_absent_kinds(pipeline, overrides)
    present = visible_accelerators() if accelerators is None else tuple(accelerators)
    top = {name: setting.value for name, setting in deployment_settings(layers).items()}
    _check_pipeline_name(pipeline, top.pop("pipeline", pipeline.model_type), deploy)
    return OmniConfig(
        model=model,
        model_path=model_path,
        served_model_name=top.pop("served_model_name", served_model_name),
        pipeline=pipeline,
        stages=share_gpus(
            tuple(
                _resolve_stage(stage, model_path, _values(pipeline, layers, stage), present)
                for stage in pipeline.stages
            ),
            layers,
        ),
        limits=EngineLimits(**top.pop("limits", {})),
        **top,
    )


def _values(
    pipeline: PipelineConfig, layers: Sequence[Layer], stage: StageConfig
) -> dict[str, Any]:
    """The stage's settings. Those of another kind of stage are an error when they are given for
    this one, and left out when they are given for the whole deployment."""
    settings = stage_settings(pipeline, layers, stage.stage_id)
    values = {name: setting.value for name, setting in settings.items()}
    for names, kinds, execution_types in KEYS_OF_KINDS:
        if stage.execution_type in execution_types:
            continue
        for name in names:
            values.pop(name, None)
            for layer in layers:
                if name in layer.stages.get(stage.stage_id, {}):
                    raise ConfigurationError(
                        f"{layer.origin}: {name} is for {kinds}, but stage {stage.stage_id} "
                        f"({stage.name}) is of kind {stage.execution_type.value}"
                    )
    return values


def _refuse_keys_of_absent_kinds(pipeline: PipelineConfig, overrides: Overrides | None) -> None:
    """A deploy file may be meant for any pipeline; an override is meant for this one."""
    if overrides is None:
        return
    present = {stage.execution_type for stage in pipeline.stages}
    for names, kinds, execution_types in KEYS_OF_KINDS:
        for name in names:
            if name in overrides.stage_defaults and not present & set(execution_types):
                raise ConfigurationError(
                    f"{overrides.origin}: {name} is for {kinds}, of which "
                    f"{pipeline.model_type!r} has none; leave it out"
                )


def _check_pipeline_name(
    pipeline: PipelineConfig, wanted: str, deploy: DeployConfig | None
) -> None:
    if wanted != pipeline.model_type:
        origin = deploy.origin if deploy else "the configuration"
        raise ConfigurationError(
            f"{origin} is for pipeline {wanted!r}, but the model is {pipeline.model_type!r}"
        )


def _resolve_stage(
    stage: StageConfig, model_path: str, values: dict[str, Any], accelerators: Sequence[str]
) -> ResolvedStage:
    parallel = ParallelConfig(**{key: values[key] for key in PARALLEL_KEYS if key in values})
    replicas = values.get("num_replicas", 1)
    process = _process(stage, values.get("process", SEPARATE_PROCESSES), parallel, replicas)
    restart = RestartPolicy(**values.get("restart", {}))
    _check_restart(stage, restart)
    defaults = values.get("default_sampling_params", {})
    _check_sampling_defaults(stage, defaults)
    _complete_streaming(stage, values)
    _choose_offload(stage, values)
    plain = {
        STAGE_KEYS[key].attribute or key: values[key] for key in _PLAIN_STAGE_KEYS if key in values
    }
    devices = resolve_devices(
        stage_id=stage.stage_id,
        device=values.get("device", "auto"),
        devices=values.get("devices"),
        ranks=parallel.world_size,
        replicas=replicas,
        accelerators=accelerators,
    )
    plain.setdefault("max_num_seqs", _default_max_num_seqs(stage, devices))
    return ResolvedStage(
        stage=stage,
        model_path=model_path,
        process=process,
        parallel=parallel,
        devices=devices,
        restart=restart,
        operation_limits_s=DEFAULT_OPERATION_LIMITS_S | values.get("operation_limits", {}),
        **plain,
    )


def _default_max_num_seqs(stage: StageConfig, devices: Sequence[str]) -> int:
    if stage.execution_type is ExecutionType.LLM_AR:
        return 16 if devices[0] == "cpu" else 32
    return 8 if stage.execution_type is ExecutionType.LLM_GENERATION else 1


def _process(stage: StageConfig, process: str, parallel: ParallelConfig, replicas: int) -> str:
    if process == SEPARATE_PROCESSES:
        return f"stage-{stage.stage_id}"
    if process != INLINE_PROCESS:
        return process
    for count, what in ((parallel.world_size, "ranks"), (replicas, "replicas")):
        if count > 1:
            raise UnsupportedCombinationError(
                f"stage {stage.stage_id}: process 'inline' cannot have {count} {what}; "
                "use process 'separate' or a name"
            )
    return process


def _check_restart(stage: StageConfig, restart: RestartPolicy) -> None:
    if restart.max_backoff_s < restart.backoff_s:
        raise UnsupportedCombinationError(
            f"stage {stage.stage_id}: restart.max_backoff_s is {restart.max_backoff_s}, less than "
            f"restart.backoff_s {restart.backoff_s}"
        )


def _complete_streaming(stage: StageConfig, values: dict[str, Any]) -> None:
    """Previews need step mode, and turn it on."""
    if not values.get("diffusion_streaming_output"):
        return
    if not values.setdefault("step_execution", True):
        raise UnsupportedCombinationError(
            f"stage {stage.stage_id}: diffusion_streaming_output needs step_execution, which is "
            "turned off; leave one of them out"
        )


def _choose_offload(stage: StageConfig, values: dict[str, Any]) -> None:
    """The switches are other words for `offload`; of several, the most distributed one holds."""
    wanted = [meaning for name, meaning in OFFLOAD_FLAGS.items() if values.pop(name, False)]
    if not wanted:
        return
    given = values.get("offload", "auto")
    if given not in ("auto", wanted[0]):
        switch = next(name for name, meaning in OFFLOAD_FLAGS.items() if meaning == wanted[0])
        raise UnsupportedCombinationError(
            f"stage {stage.stage_id}: {switch} means offload {wanted[0]!r}, but offload is "
            f"{given!r}; leave one of them out"
        )
    values["offload"] = wanted[0]


def _check_sampling_defaults(stage: StageConfig, defaults: dict[str, Any]) -> None:
    """Names and types against the parameters of this kind of stage."""
    struct = PARAMS_BY_EXECUTION[stage.execution_type]
    where = f"stage {stage.stage_id}: default_sampling_params"
    names = [field.name for field in msgspec.structs.fields(struct)]
    for name in defaults:
        if name not in names:
            raise ConfigurationError(
                f"{where}.{name} does not exist; {suggestion(str(name), names)}"
            )
    try:
        msgspec.convert(defaults, struct)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where}: {str(error).replace('`', '')}") from error
