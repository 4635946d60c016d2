"""The decision in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.memory.budget import GIB_BYTES
from omnistage.memory.plan import gib
from omnistage.memory.planning.choose import Choice
from omnistage.memory.planning.refusal import Problem
from omnistage.memory.planning.work import PHASES

if TYPE_CHECKING:
    from omnistage.memory.planning.survey import PipelineSurvey

WHAT = {
    "none": "all weights stay on the device",
    "model": "encoders and denoisers take turns on the device",
    "layerwise": "blocks are copied in for each pass",
    "distributed-layerwise": "blocks are copied in for each pass",
}


def reasons_for(problem: Problem, choice: Choice, survey: PipelineSurvey) -> tuple[str, ...]:
    """The decision first."""
    chosen, budget = choice.candidate, problem.budget
    asked = problem.is_asked
    what = f"{WHAT[chosen.strategy]}{_sharing(problem, chosen.strategy)}"
    lines = [
        f"offload {chosen.strategy} ({'asked for' if asked else f'memory {problem.memory}'}): "
        f"{what}; {gib(chosen.peak_bytes)} of {budget} at the peak, for {survey.shape}"
    ]
    if chosen.strategy != "none":
        resident_bytes = (
            sum(size.weight_bytes for size in problem.sizes.values())
            + problem.facts.workspace_bytes
            + max(problem.work.activation_bytes(phase) for phase in PHASES)
        )
        lines.append(f"all resident it would be {gib(resident_bytes)}")
    if choice.headroom_bytes:
        left = budget.limit_bytes - problem.needed_bytes(chosen)
        what = f"memory {problem.memory} wants {gib(choice.headroom_bytes)} free"
        lines.append(
            f"{what} besides fragments; {gib(left)} are"
            + (", the most that can be" if choice.is_short else "")
        )
    unlocked = _unlocked(problem, choice)
    if unlocked:
        lines.append(unlocked)
    return (*lines, *_unmapped(problem, choice), *_idle(problem, choice), *_basis(problem))


def _sharing(problem: Problem, strategy: str) -> str:
    if strategy != "distributed-layerwise":
        return ""
    shares = problem.constraints.shares
    return f", a share by each of {shares} ranks" if shares > 1 else ", by each rank all of them"


def _streaming(problem: Problem, choice: Choice) -> tuple[str, ...]:
    return tuple(
        name
        for name, kept in choice.candidate.residents.items()
        if len(kept) < len(problem.sizes[name].blocks)
    )


def _unmapped(problem: Problem, choice: Choice) -> list[str]:
    names = [name for name in _streaming(problem, choice) if not problem.sizes[name].is_mapped]
    if not names:
        return []
    why = f"{', '.join(names)}: the checkpoint's files do not hold the bytes that are wanted"
    if problem.constraints.runtime_cache == "off":
        return [f"{why}, so streamed blocks are private memory"]
    return [f"{why}, so the runtime cache does; until it is written, host memory of the same size"]


def _unlocked(problem: Problem, choice: Choice) -> str:
    moved = choice.candidate.swapped or _streaming(problem, choice)
    names = [name for name in moved if name not in choice.candidate.locking.locked_components]
    if not names:
        return ""
    rate = problem.facts.staged_bytes_per_s / GIB_BYTES
    return (
        f"not page-locked, so copied at {rate:.1f} GiB/s: {', '.join(names)} (host memory or "
        "dlo_runtime_cache_pin_limit_gib is too small)"
    )


def _idle(problem: Problem, choice: Choice) -> list[str]:
    lines = []
    for name in _streaming(problem, choice):
        work = problem.work.components[name]
        count = sum(block.path not in work.block_s for block in problem.sizes[name].blocks)
        if count and work.is_known:
            lines.append(
                f"{name}: {count} of its blocks do not run for a prompt alone, so they stream "
                "first; requests with pictures wait for them"
            )
    return lines


def _basis(problem: Problem) -> list[str]:
    facts = problem.facts
    how = "measured" if facts.link_is_measured else "assumed"
    return [
        f"link {facts.link_bytes_per_s / GIB_BYTES:.1f} GiB/s, {how}"
        + (f"; as if on {facts.label}" if facts.is_assumed else ""),
        "counted are bytes of torch's allocator: weights, slots, activations, workspaces of "
        "libraries; not the device's context and not what the allocator holds unused",
        *problem.work.notes,
    ]
