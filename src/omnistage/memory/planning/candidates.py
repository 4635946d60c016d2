"""All ways to place a pipeline that the planner weighs, each with its memory and its time.

Which ways there are does not depend on the budget: a larger one admits more of them and never
takes one away, so that more memory never means slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from omnistage.memory.offload.host import aligned
from omnistage.memory.planning.facts import DeviceFacts
from omnistage.memory.planning.levels import levels, used_blocks
from omnistage.memory.planning.locking import Locking, plan_locking
from omnistage.memory.planning.ring_time import TimedBlock, cold_time_s, pass_time_s
from omnistage.memory.planning.sizes import ComponentSize, by_part
from omnistage.memory.planning.work import PHASES, ComponentWork, PipelineWork

LAYERWISE = ("layerwise", "distributed-layerwise")
SLOT_COUNT = 2


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a stage's settings ask for. `strategies` are those allowed; `resident_layers`,
    `runtime_cache` and `page_lock_limit_bytes` are the stage's `dlo_` settings; `shares` into how
    many parts ranks divide streamed weights."""

    strategies: tuple[str, ...] = ("none", "model", "layerwise")
    resident_layers: int | None = None
    runtime_cache: str = "auto"
    page_lock_limit_bytes: int | None = None
    shares: int = 1


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """`residents` are, by component with blocks, indices of those that do not stream. Peaks include
    weights. `request_s` counts all copies, and of computation what is known."""

    strategy: str
    residents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    swapped: tuple[str, ...] = ()
    phases_bytes: Mapping[str, int]
    slot_bytes: int = 0
    locking: Locking = field(default_factory=Locking)
    step_s: float | None
    request_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.phases_bytes.values())


@dataclass(frozen=True, kw_only=True)
class _Problem:
    sizes: Mapping[str, ComponentSize]
    work: PipelineWork
    facts: DeviceFacts
    constraints: Constraints

    def streams(self, part: str) -> list[ComponentSize]:
        return [size for size in by_part(self.sizes, part) if size.blocks]

    def rate(self, locking: Locking, component: str) -> float:
        facts = self.facts
        locked = component in locking.locked_components
        return facts.link_bytes_per_s if locked else facts.staged_bytes_per_s


def candidates(
    sizes: Mapping[str, ComponentSize],
    work: PipelineWork,
    facts: DeviceFacts,
    constraints: Constraints,
) -> Iterator[Candidate]:
    """In no order. None of them where the strategies have nothing to work on."""
    problem = _Problem(sizes=sizes, work=work, facts=facts, constraints=constraints)
    for strategy in constraints.strategies:
        if strategy in LAYERWISE:
            yield from _streamed(problem, strategy)
        elif strategy == "model":
            yield from _swapped(problem)
        elif constraints.resident_layers is None:
            yield _resident(problem)


def _resident(problem: _Problem) -> Candidate:
    work = problem.work
    weight_bytes = sum(size.weight_bytes for size in problem.sizes.values())
    fixed_bytes = weight_bytes + problem.facts.workspace_bytes
    passes_s = {name: one.resident_s for name, one in work.components.items()}
    return Candidate(
        strategy="none",
        phases_bytes={phase: fixed_bytes + work.activation_bytes(phase) for phase in PHASES},
        step_s=_step_s(work, passes_s),
        request_s=_request_s(work, passes_s),
    )


def _swapped(problem: _Problem) -> Iterator[Candidate]:
    """Encoders and denoisers exclude each other, and denoisers one another; what denoised stays for
    the decoder's turn."""
    sizes, work, constraints = problem.sizes, problem.work, problem.constraints
    encoders, denoisers = by_part(sizes, "encoders"), by_part(sizes, "denoisers")
    swapped = {one.component: one.weight_bytes for one in (*encoders, *denoisers)}
    if len(swapped) < 2 or not denoisers or constraints.resident_layers is not None:
        return
    fixed_bytes = problem.facts.workspace_bytes + sum(
        size.weight_bytes for name, size in sizes.items() if name not in swapped
    )
    largest_bytes = max(one.weight_bytes for one in denoisers)
    phases_bytes = {
        "encode": sum(one.weight_bytes for one in encoders) + work.activation_bytes("encode"),
        "denoise": max(
            one.weight_bytes + work.components[one.component].activation_bytes for one in denoisers
        ),
        "decode": largest_bytes + work.activation_bytes("decode"),
    }
    locking = plan_locking(
        swapped, problem.facts, constraints.page_lock_limit_bytes, own_bytes=sum(swapped.values())
    )
    passes_s = {name: one.compute_s for name, one in work.components.items()}
    arrivals_s = sum(nbytes / problem.rate(locking, name) for name, nbytes in swapped.items())
    yield Candidate(
        strategy="model",
        swapped=tuple(swapped),
        phases_bytes={phase: fixed_bytes + nbytes for phase, nbytes in phases_bytes.items()},
        locking=locking,
        step_s=_step_s(work, passes_s),
        request_s=_request_s(work, passes_s) + arrivals_s,
    )


def _streamed(problem: _Problem, strategy: str) -> Iterator[Candidate]:
    denoisers, encoders = problem.streams("denoisers"), problem.streams("encoders")
    work = problem.work.components
    for of_denoisers in levels(denoisers, work, problem.constraints.resident_layers):
        for of_encoders in levels(encoders, work):
            residents = {**of_denoisers, **of_encoders}
            if any(len(problem.sizes[name].blocks) > len(kept) for name, kept in residents.items()):
                yield _layerwise(problem, strategy, residents)


def _layerwise(
    problem: _Problem, strategy: str, residents: Mapping[str, tuple[int, ...]]
) -> Candidate:
    sizes, work = problem.sizes, problem.work
    shares = problem.constraints.shares
    streamed = {
        name: [block for index, block in enumerate(sizes[name].blocks) if index not in kept]
        for name, kept in residents.items()
    }
    images = [block.image_bytes for blocks in streamed.values() for block in blocks]
    slot_bytes = shares * aligned(-(-max(images) // shares))
    away_bytes = sum(block.resident_bytes for blocks in streamed.values() for block in blocks)
    fixed_bytes = (
        sum(size.weight_bytes for size in sizes.values())
        - away_bytes
        + SLOT_COUNT * slot_bytes
        + problem.facts.workspace_bytes
    )
    locking = _layerwise_locking(problem, streamed, slot_bytes)
    passes_s = {
        name: _pass_s(problem, one, residents.get(name), locking)
        for name, one in work.components.items()
    }
    return Candidate(
        strategy=strategy,
        residents=residents,
        phases_bytes={phase: fixed_bytes + work.activation_bytes(phase) for phase in PHASES},
        slot_bytes=slot_bytes,
        locking=locking,
        step_s=_step_s(work, passes_s),
        request_s=_request_s(work, passes_s),
    )


def _layerwise_locking(problem: _Problem, streamed: Mapping[str, list], slot_bytes: int) -> Locking:
    constraints = problem.constraints
    held = {
        name: sum(-(-block.image_bytes // constraints.shares) for block in blocks)
        for name, blocks in streamed.items()
        if blocks
    }
    own_bytes = sum(held[name] for name in held if not _maps(problem, name))
    return plan_locking(
        held,
        problem.facts,
        constraints.page_lock_limit_bytes,
        own_bytes=own_bytes,
        staging_bytes=SLOT_COUNT * -(-slot_bytes // constraints.shares),
    )


def _maps(problem: _Problem, component: str) -> bool:
    """Whether the blocks lie in a file: the checkpoint's, or the cache's."""
    return problem.sizes[component].is_mapped or problem.constraints.runtime_cache != "off"


def _pass_s(
    problem: _Problem, work: ComponentWork, residents: tuple[int, ...] | None, locking: Locking
) -> float:
    if residents is None:
        return work.compute_s
    size = problem.sizes[work.component]
    rate = problem.rate(locking, work.component) * problem.constraints.shares
    kept = set(residents)
    timed = [
        TimedBlock(
            compute_s=work.block_s.get(size.blocks[index].path, 0.0),
            copy_s=0.0 if index in kept else size.blocks[index].image_bytes / rate,
        )
        for index in used_blocks(size, work)
    ]
    if work.phase == "denoise":
        return pass_time_s(timed, work.rest_s)
    return cold_time_s(timed, work.rest_s, work.passes) / max(1, work.passes)


def _step_s(work: PipelineWork, passes_s: Mapping[str, float]) -> float | None:
    """Of several denoisers one runs in a step: the slowest."""
    denoisers = work.of_phase("denoise")
    if not denoisers or not all(one.is_known for one in denoisers):
        return None
    return max(one.passes * passes_s[one.component] for one in denoisers)


def _request_s(work: PipelineWork, passes_s: Mapping[str, float]) -> float:
    denoisers = work.of_phase("denoise")
    step_s = max((one.passes * passes_s[one.component] for one in denoisers), default=0.0)
    others = [one for one in work.components.values() if one.phase != "denoise"]
    return work.steps * step_s + sum(one.passes * passes_s[one.component] for one in others)
