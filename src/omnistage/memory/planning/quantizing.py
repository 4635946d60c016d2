"""What a stage's `quantization_config` makes of a pipeline's components, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnistage.memory.float8_layers import QuantizationRequest
from omnistage.memory.planning.facts import DeviceFacts
from omnistage.quantization.config import resolve_quantization

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.memory.host.seams import BlockTransform
    from omnistage.memory.pipeline_plan import PipelinePlan


def quantization_of(stage: ResolvedStage, facts: DeviceFacts) -> QuantizationRequest:
    return QuantizationRequest(
        plan=resolve_quantization(stage.quantization_config),
        device=facts.device,
        float8=facts.float8,
    )


def transforms_of(
    plan: PipelinePlan, stage: ResolvedStage, facts: DeviceFacts
) -> Mapping[str, BlockTransform]:
    """By component, of those that are quantized while they are loaded."""
    wanted = resolve_quantization(stage.quantization_config)
    if not wanted.is_on:
        return {}
    from omnistage.quantization.convert import make_transforms

    modules = {name: one.skeleton.look() for name, one in plan.modules.items()}
    return make_transforms(wanted, modules, device=facts.device, float8=facts.float8)
