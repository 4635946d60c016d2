"""From the plan of a pipeline to its placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.memory.budget import GIB_BYTES, DeviceBudget
from omnistage.memory.offload.base import check_strategy
from omnistage.memory.offload.host import HostBacking
from omnistage.memory.offload.sharding import share_count
from omnistage.memory.placement import ComponentPlacement, Placement, Prediction, Residency
from omnistage.memory.planning.candidates import LAYERWISE, Candidate, Constraints
from omnistage.memory.planning.choose import Choice, choose
from omnistage.memory.planning.facts import DeviceFacts
from omnistage.memory.planning.reasons import reasons_for
from omnistage.memory.planning.refusal import FREE_STRATEGIES, Problem, Refusal
from omnistage.memory.planning.shape import RequestShape
from omnistage.memory.planning.sizes import ComponentSize, by_part
from omnistage.memory.planning.work import ComponentWork, PipelineWork

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.memory.host.seams import BlockTransform
    from omnistage.memory.pipeline_plan import PipelinePlan
    from omnistage.memory.planning.signatures import OpSignature
    from omnistage.memory.planning.survey import PipelineSurvey, Survey


PART_ORDER = ("denoisers", "encoders", "autoencoders", "resident")
"""Pages are locked in this order: what is copied in every step first."""

GRAPH_MAX_TOKENS = 4096
"""As the option `graph_max_tokens` of a diffusion stage where it is not set."""


def plan_placement(
    pipeline_plan: PipelinePlan,
    stage: ResolvedStage,
    device_facts: DeviceFacts,
    shape: RequestShape,
    *,
    survey: PipelineSurvey | None = None,
    measured_s: Mapping[OpSignature, float] | None = None,
    transforms: Mapping[str, BlockTransform] | None = None,
) -> Placement:
    """Where everything goes, and what that takes, for requests of `shape`. Reads no weights.

    `survey` is that of `survey_pipeline`, made here where it is not given; `measured_s` are
    seconds of operations (`measure_ops`), the others are told from the device's rates.
    `transforms` quantize components, by name. Raises `ConfigurationError` when nothing fits the
    budget and `UnsupportedCombinationError` when what was asked for cannot be, with the numbers
    and the nearest that works.
    """
    from omnistage.memory.planning.survey import survey_pipeline

    if survey is None:
        survey = survey_pipeline(pipeline_plan, stage, shape, transforms)
    problem = problem_of(survey, stage, device_facts, measured_s or {})
    made = choose(problem)
    if isinstance(made, Refusal):
        error = UnsupportedCombinationError if problem.is_asked else ConfigurationError
        raise error(f"{pipeline_plan.pipeline_class.__name__} at {shape}: {made.message}")
    return _placement(problem, made, survey)


def problem_of(
    survey: PipelineSurvey,
    stage: ResolvedStage,
    facts: DeviceFacts,
    measured_s: Mapping[OpSignature, float],
) -> Problem:
    """Raises `UnsupportedCombinationError` for a strategy on a device without offload."""
    return Problem(
        sizes=survey.sizes,
        work=work_of(survey, stage, facts, measured_s),
        facts=facts,
        constraints=constraints_of(stage, facts),
        budget=DeviceBudget.of(stage.memory_budget_gib, facts.free_bytes),
        memory=stage.memory,
    )


def constraints_of(stage: ResolvedStage, facts: DeviceFacts) -> Constraints:
    """Of the settings. Raises `UnsupportedCombinationError` where offload cannot be."""
    limit_gib = stage.dlo_runtime_cache_pin_limit_gib
    reason = facts.offload_unavailable_reason
    if stage.offload == "auto":
        strategies = FREE_STRATEGIES if reason is None else ("none",)
    else:
        strategies = (check_strategy(stage.offload),)
    if reason is not None and strategies != ("none",):
        raise UnsupportedCombinationError(
            f"offload {stage.offload!r} on {facts.label}: {reason}; nearest that works: offload "
            "none",
            param="offload",
        )
    return Constraints(
        strategies=strategies,
        resident_layers=stage.dlo_resident_layers,
        runtime_cache=stage.dlo_runtime_cache,
        page_lock_limit_bytes=None if limit_gib is None else int(limit_gib * GIB_BYTES),
        shares=share_count(stage),
    )


def work_of(
    survey: PipelineSurvey,
    stage: ResolvedStage,
    facts: DeviceFacts,
    measured_s: Mapping[OpSignature, float],
) -> PipelineWork:
    """What each component does, in seconds of the device."""
    from omnistage.memory.planning.times import OpTimes

    components = {name: _work(survey, name, stage, facts, measured_s) for name in survey.components}
    share = OpTimes(facts=facts, measured_s=measured_s).measured_share(survey.ops)
    basis = f"times of operations: {share:.0%} measured, the rest by the device's rates"
    notes = (basis, *survey.notes)
    return PipelineWork(components=components, steps=survey.shape.steps, notes=notes)


def _work(
    survey: PipelineSurvey,
    name: str,
    stage: ResolvedStage,
    facts: DeviceFacts,
    measured_s: Mapping[OpSignature, float],
) -> ComponentWork:
    from omnistage.memory.planning.times import OpTimes

    one = survey.components[name]
    compiled = one.phase == "denoise" and compiles(stage, facts)
    times = OpTimes(facts=facts, measured_s=measured_s, compiled=compiled)
    ops = {} if one.profile is None else dict(one.profile.block_ops)
    rest = ops.pop("", {})
    blocks_s = {path: times.device_s(counted) for path, counted in ops.items()}
    rest_s = times.device_s(rest, is_block=False)
    limit_tokens = int(stage.options.get("graph_max_tokens", GRAPH_MAX_TOKENS))
    captured = compiled and survey.tokens(name) <= limit_tokens
    return ComponentWork(
        component=name,
        phase=one.phase,
        activation_bytes=_activation_bytes(one, compiled),
        block_s={path: max(blocks_s[path], times.host_s(ops[path])) for path in ops},
        rest_s=max(rest_s, times.host_s(rest, is_block=False)),
        captured_s=sum(blocks_s.values()) + rest_s if captured else None,
        passes=one.passes,
        is_known=one.profile is not None,
        note=one.note,
    )


def compiles(stage: ResolvedStage, facts: DeviceFacts) -> bool:
    """Whether the stage compiles the blocks of its denoiser."""
    has_family = stage.options.get("step_family") is not None
    return has_family and not stage.enforce_eager and facts.device != "cpu"


def _activation_bytes(one: Survey, compiled: bool) -> int:
    from omnistage.memory.planning.times import COMPILED_ACTIVATIONS

    if one.profile is None or not compiled:
        return one.activation_bytes
    compiled_bytes = int(one.profile.compiled_activation_bytes * COMPILED_ACTIVATIONS)
    return min(one.activation_bytes, compiled_bytes)


def _placement(problem: Problem, choice: Choice, survey: PipelineSurvey) -> Placement:
    chosen = choice.candidate
    components = {
        size.component: _component(size, chosen)
        for part in PART_ORDER
        for size in by_part(problem.sizes, part)
    }
    return Placement(
        strategy=chosen.strategy,
        components=components,
        backing=_backing(problem, components),
        page_lock_limit_bytes=(
            problem.constraints.page_lock_limit_bytes if problem.facts.locks_pages else 0
        ),
        prediction=Prediction(
            device_peak_bytes=chosen.peak_bytes,
            host_bytes=chosen.locking.host_bytes,
            locked_bytes=chosen.locking.locked_bytes,
            step_s=chosen.step_s,
            phases_bytes=dict(chosen.phases_bytes),
        ),
        reasons=reasons_for(problem, choice, survey),
    )


def _component(size: ComponentSize, chosen: Candidate) -> ComponentPlacement:
    kept = chosen.residents.get(size.component)
    streamed = [
        block for index, block in enumerate(size.blocks) if kept is not None and index not in kept
    ]
    residency = Residency.STREAMED if streamed else Residency.RESIDENT
    if size.component in chosen.swapped:
        residency = Residency.SWAPPED
    return ComponentPlacement(
        component=size.component,
        residency=residency,
        weight_bytes=size.weight_bytes,
        streamed_blocks=tuple(block.path for block in streamed),
        streamed_bytes=sum(block.image_bytes for block in streamed),
        block_bytes=max((block.image_bytes for block in streamed), default=0),
    )


def _backing(problem: Problem, components: Mapping[str, ComponentPlacement]) -> HostBacking:
    """The loader takes each component's blocks from there, or, where it cannot, from the next of
    checkpoint, cache and private memory."""
    streamed = [name for name, one in components.items() if one.streamed_blocks]
    cache = problem.constraints.runtime_cache
    if not streamed and problem.constraints.strategies[0] not in LAYERWISE:
        return HostBacking.CHECKPOINT
    if cache == "on":
        return HostBacking.RUNTIME_CACHE
    if any(problem.sizes[name].is_mapped for name in streamed):
        return HostBacking.CHECKPOINT
    return HostBacking.RUNTIME_CACHE if cache == "auto" else HostBacking.PRIVATE
