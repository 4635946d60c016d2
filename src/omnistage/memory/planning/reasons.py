"""The decision in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.memory.plan import gib
from omnistage.memory.planning.choose import Choice
from omnistage.memory.planning.refusal import FREE_STRATEGIES, Problem
from omnistage.memory.planning.work import PHASES

if TYPE_CHECKING:
    from omnistage.memory.planning.survey import PipelineSurvey

WHAT = {
    "none": "all weights stay on the device",
    "model": "encoders and denoisers take turns on the device",
    "layerwise": "blocks are copied in for each pass",
    "distributed-layerwise": "blocks are copied in for each pass, by all ranks together",
}


def reasons_for(problem: Problem, choice: Choice, survey: PipelineSurvey) -> tuple[str, ...]:
    """The decision first."""
    chosen, budget = choice.candidate, problem.budget
    asked = problem.constraints.strategies != FREE_STRATEGIES
    lines = [
        f"offload {chosen.strategy} ({'asked for' if asked else f'memory {problem.memory}'}): "
        f"{WHAT[chosen.strategy]}; {gib(chosen.peak_bytes)} of {budget} at the peak, for "
        f"{survey.shape}"
    ]
    if chosen.strategy != "none":
        resident_bytes = (
            sum(size.weight_bytes for size in problem.sizes.values())
            + problem.facts.workspace_bytes
            + max(problem.work.activation_bytes(phase) for phase in PHASES)
        )
        lines.append(f"all resident it would be {gib(resident_bytes)}")
    if choice.headroom_bytes:
        left = budget.limit_bytes - chosen.peak_bytes
        what = f"memory {problem.memory} wants {gib(choice.headroom_bytes)} free"
        lines.append(f"{what}; {gib(left)} are" + (", the most that can be" * choice.is_short))
    unlocked = _unlocked(problem, choice)
    if unlocked:
        lines.append(unlocked)
    return (*lines, *_basis(problem, survey))


def _unlocked(problem: Problem, choice: Choice) -> str:
    moved = choice.candidate.swapped or tuple(
        name
        for name, kept in choice.candidate.residents.items()
        if len(kept) < len(problem.sizes[name].blocks)
    )
    names = [name for name in moved if name not in choice.candidate.locking.locked_components]
    if not names:
        return ""
    rate = problem.facts.staged_bytes_per_s / 1e9
    return (
        f"not page-locked, so copied at {rate:.1f} GB/s: {', '.join(names)} (host memory or "
        "dlo_runtime_cache_pin_limit_gib is too small)"
    )


def _basis(problem: Problem, survey: PipelineSurvey) -> list[str]:
    facts = problem.facts
    how = "measured" if facts.link_is_measured else "assumed"
    return [
        f"link {facts.link_bytes_per_s / 1e9:.1f} GB/s, {how}"
        + (f"; as if on {facts.label}" if facts.is_assumed else ""),
        "counted are bytes of torch's allocator: weights, slots, activations, workspaces of "
        "libraries; not the device's context and not what the allocator holds unused",
        *survey.notes,
    ]
