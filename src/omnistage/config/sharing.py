"""What changes for stages that share a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omnistage.config.layers import Layer
from omnistage.config.pipeline import ExecutionType
from omnistage.config.resolved import ResolvedStage

SHARED_KV_CACHE_GIB = 4.0
"""Of a token stage that shares its GPU: 44,000 tokens of Qwen3-Omni's thinker, 210,000 of its
talker."""
_SIZES = ("kv_cache_gib", "gpu_memory_utilization")


def share_gpus(
    stages: tuple[ResolvedStage, ...], layers: Sequence[Layer]
) -> tuple[ResolvedStage, ...]:
    """A token stage takes what its GPU has left for its KV cache; the one that loads first would
    leave nothing for another. Where stages share a GPU each gets `SHARED_KV_CACHE_GIB` instead,
    unless somebody has sized it."""
    return tuple(_settled(stage, stages, layers) for stage in stages)


def _settled(
    stage: ResolvedStage, stages: Sequence[ResolvedStage], layers: Sequence[Layer]
) -> ResolvedStage:
    if stage.stage.execution_type is not ExecutionType.LLM_AR or _is_sized(stage, layers):
        return stage
    others = {device for other in stages if other is not stage for device in other.devices}
    if any(device != "cpu" and device in others for device in stage.devices):
        return replace(stage, kv_cache_gib=SHARED_KV_CACHE_GIB)
    return stage


def _is_sized(stage: ResolvedStage, layers: Sequence[Layer]) -> bool:
    return any(
        name in layer.stage_defaults or name in layer.stages.get(stage.stage_id, {})
        for layer in layers
        for name in _SIZES
    )
