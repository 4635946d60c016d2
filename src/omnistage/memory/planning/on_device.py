"""A placement for a device that is here, whose link and operations are tried first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.placement import Placement
from omnistage.memory.planning.facts import DeviceFacts
from omnistage.memory.planning.measure import (
    LIMIT_S,
    measure_link,
    measure_ops,
    op_times_path,
)
from omnistage.memory.planning.place import plan_placement
from omnistage.memory.planning.shape import RequestShape
from omnistage.memory.planning.survey import PipelineSurvey, survey_pipeline

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.memory.host.seams import BlockTransform
    from omnistage.memory.pipeline_plan import PipelinePlan
    from omnistage.platforms.base import Platform

logger = logging.getLogger(__name__)


def place_on_device(
    plan: PipelinePlan,
    stage: ResolvedStage,
    platform: Platform,
    facts: DeviceFacts,
    shape: RequestShape,
    transforms: Mapping[str, BlockTransform] | None = None,
) -> Placement:
    """As `plan_placement`, with measured rates where weights can move: takes some seconds of the
    device the first time, and less later. `facts` are those of `find_facts`."""
    survey = survey_pipeline(plan, stage, shape, transforms)
    if platform.offload_unavailable_reason() is not None:
        return plan_placement(plan, stage, facts, shape, survey=survey)
    return _measured(plan, stage, platform, facts, survey, limit_s=LIMIT_S)


def place_for_serving(
    plan: PipelinePlan,
    stage: ResolvedStage,
    platform: Platform,
    facts: DeviceFacts,
    shape: RequestShape,
    transforms: Mapping[str, BlockTransform] | None = None,
) -> Placement:
    """As `place_on_device`, for a start, which must not wait: the link is tried, in a fraction of a
    second and only where something has to move; times of operations are those that `plan` has kept
    for this device, the others are assumed."""
    survey = survey_pipeline(plan, stage, shape, transforms)
    placement = plan_placement(plan, stage, facts, shape, survey=survey)
    if placement.strategy == "none" or platform.device_type == "cpu":
        return placement
    return _measured(plan, stage, platform, facts, survey, limit_s=0.0)


def _measured(
    plan: PipelinePlan,
    stage: ResolvedStage,
    platform: Platform,
    facts: DeviceFacts,
    survey: PipelineSurvey,
    *,
    limit_s: float,
) -> Placement:
    """`limit_s` 0 tries no operation: what was kept of them serves."""
    facts = with_measured_link(platform, facts)
    cache = op_times_path(stage.weight_cache_dir)
    measured_s = measure_ops(survey.ops, platform, facts, cache=cache, limit_s=limit_s)
    return plan_placement(plan, stage, facts, survey.shape, survey=survey, measured_s=measured_s)


def with_measured_link(platform: Platform, facts: DeviceFacts) -> DeviceFacts:
    """With the link's rate as it is; where nothing can be page-locked, facts that say so; where the
    device is too full to try, the rate that was assumed."""
    import torch

    try:
        rate = measure_link(platform, facts.device)
    except torch.OutOfMemoryError:
        logger.warning("%s is too full to try its link; its rate is assumed", facts.device)
        return facts
    except UnsupportedCombinationError as error:
        logger.warning("%s: copies will be slow", error)
        return replace(facts, locks_pages=False)
    rates = replace(facts.rates, link_bytes_per_s=rate)
    return replace(facts, rates=rates, link_is_measured=True)
