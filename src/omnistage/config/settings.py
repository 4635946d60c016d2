"""Merging the layers: per stage beats global beats deploy file beats the model's own default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omnistage.config.layers import Layer
from omnistage.config.pipeline import PipelineConfig
from omnistage.contracts.errors import ConfigurationError

MODEL_DEFAULT = "model"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value and the layer that it came from, for people."""

    value: Any
    origin: str


Settings = dict[str, Setting]


def stage_settings(pipeline: PipelineConfig, layers: Sequence[Layer], stage_id: int) -> Settings:
    """Everything said about one stage, lowest layer first; mappings are merged key by key."""
    merged: Settings = {}
    for origin, values in _about_stage(pipeline, layers, stage_id):
        if "device" in values and "devices" not in values:
            merged.pop("devices", None)
        elif "devices" in values and "device" not in values:
            merged.pop("device", None)
        for name, value in values.items():
            below = merged.get(name)
            combined = merge(below.value, value) if below else value
            merged[name] = Setting(value=combined, origin=origin)
    return merged


def deployment_settings(layers: Sequence[Layer]) -> Settings:
    """Everything said about the deployment as a whole."""
    merged: Settings = {}
    for layer in layers:
        for name, value in layer.deployment.items():
            below = merged.get(name)
            combined = merge(below.value, value) if below else value
            merged[name] = Setting(value=combined, origin=layer.origin)
    return merged


def check_stage_ids(pipeline: PipelineConfig, layers: Sequence[Layer]) -> None:
    """Refuse settings for stages that the pipeline does not have."""
    count = len(pipeline.stages)
    known = f"pipeline {pipeline.model_type!r} has stages 0 to {count - 1}"
    for origin, ids in [
        ("the model's defaults", {*pipeline.default_sampling_params, *pipeline.options}),
        *[(layer.origin, set(layer.stages)) for layer in layers],
    ]:
        extra = sorted(stage_id for stage_id in ids if not 0 <= stage_id < count)
        if extra:
            raise ConfigurationError(f"{origin} names stage {extra[0]}, but {known}")
    for layer in layers:
        if "default_sampling_params" in layer.stage_defaults and count > 1:
            example = '{"0": {…}, "1": {…}}'
            raise ConfigurationError(
                f"{layer.origin}: default_sampling_params of a pipeline with {count} stages are "
                f"given by stage id, as {example}"
            )


def merge(below: Any, above: Any) -> Any:
    """`above`, with what only `below` has where both are mappings."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = dict(below)
    for name, value in above.items():
        merged[name] = merge(below[name], value) if name in below else value
    return merged


def _about_stage(
    pipeline: PipelineConfig, layers: Sequence[Layer], stage_id: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    model = {
        "default_sampling_params": pipeline.default_sampling_params.get(stage_id),
        "options": pipeline.options.get(stage_id),
    }
    yield MODEL_DEFAULT, {name: value for name, value in model.items() if value}
    for layer in layers:
        yield layer.origin, layer.stage_defaults
        yield layer.origin, layer.stages.get(stage_id, {})
