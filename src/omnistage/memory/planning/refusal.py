"""Why nothing works, and the least change with which something does. What is named was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omnistage.memory.budget import GIB_BYTES, DeviceBudget
from omnistage.memory.plan import gib
from omnistage.memory.planning.candidates import LAYERWISE, Candidate, Constraints, candidates
from omnistage.memory.planning.facts import DeviceFacts
from omnistage.memory.planning.sizes import FIXED_PARTS, ComponentSize
from omnistage.memory.planning.work import PipelineWork

FREE_STRATEGIES = Constraints().strategies
FRAGMENTS_OF_WEIGHTS = 0.01
FRAGMENTS_OF_ACTIVATIONS = 0.50
"""What torch's allocator is taken to hold besides what is allocated: a device runs out of memory by
what is held, a prediction is of what is allocated. The denoiser of Wan (14 B, 832x480, 17 frames),
whose activations take 0.84 GiB, failed on an H200 under a bound of 16 GiB with 0.31 GiB held."""

STEP_GIB = 0.05
"""Budgets are named in multiples of it."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`memory` is the mode."""

    sizes: Mapping[str, ComponentSize]
    work: PipelineWork
    facts: DeviceFacts
    constraints: Constraints
    budget: DeviceBudget
    memory: str = "auto"

    def candidates(self) -> list[Candidate]:
        return list(candidates(self.sizes, self.work, self.facts, self.constraints))

    def needed_bytes(self, one: Candidate) -> int:
        """The peak, and what the allocator then holds unused."""
        return max(
            nbytes + self._fragments_bytes(nbytes, self.work.activation_bytes(phase))
            for phase, nbytes in one.phases_bytes.items()
        )

    def admits(self, one: Candidate) -> bool:
        return (
            self.needed_bytes(one) <= self.budget.limit_bytes
            and one.locking.host_bytes <= self.facts.host_free_bytes
        )

    def _fragments_bytes(self, nbytes: int, activation_bytes: int) -> int:
        weights_bytes = max(0, nbytes - activation_bytes)
        return int(
            FRAGMENTS_OF_WEIGHTS * weights_bytes + FRAGMENTS_OF_ACTIVATIONS * activation_bytes
        )

    @property
    def free_strategies(self) -> tuple[str, ...]:
        """What may be chosen when nobody asks for a strategy."""
        return FREE_STRATEGIES if self.facts.offload_unavailable_reason is None else ("none",)

    @property
    def is_asked(self) -> bool:
        """Whether somebody asked for a strategy."""
        return self.constraints.strategies != self.free_strategies

    @property
    def possible(self) -> list[Candidate]:
        return [one for one in self.candidates() if self.admits(one)]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """`nearest` are a stage's settings by name, or "device_memory_gib", with which something works;
    empty where nothing does."""

    reason: str
    nearest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> str:
        if not self.nearest:
            return f"{self.reason}; nothing that the planner knows changes that"
        words = [_word(name, value) for name, value in self.nearest.items()]
        return f"{self.reason}; nearest that works: {' and '.join(words)}"


def refuse(problem: Problem) -> Refusal:
    """For a problem without a possible candidate."""
    reason = _reason(problem, problem.candidates())
    for changes in _changes(problem):
        if changed(problem, changes).possible:
            return Refusal(reason=reason, nearest=changes)
    return Refusal(reason=reason)


def changed(problem: Problem, changes: Mapping[str, Any]) -> Problem:
    """The problem with other settings."""
    constraints, budget, facts = problem.constraints, problem.budget, problem.facts
    if "offload" in changes:
        wanted = changes["offload"]
        strategies = problem.free_strategies if wanted == "auto" else (wanted,)
        constraints = replace(constraints, strategies=strategies)
    if "dlo_resident_layers" in changes:
        constraints = replace(constraints, resident_layers=changes["dlo_resident_layers"])
    if "dlo_runtime_cache" in changes:
        constraints = replace(constraints, runtime_cache=changes["dlo_runtime_cache"])
    if "device_memory_gib" in changes:
        total_bytes = int(changes["device_memory_gib"] * GIB_BYTES)
        free_bytes = max(0, total_bytes - facts.taken_bytes)
        facts = replace(facts, total_bytes=total_bytes, free_bytes=free_bytes)
        if not budget.is_set:
            budget = DeviceBudget.of(None, facts.free_bytes)
    if "memory_budget_gib" in changes:
        budget = DeviceBudget.of(changes["memory_budget_gib"], facts.free_bytes)
    return replace(problem, constraints=constraints, budget=budget, facts=facts)


def _changes(problem: Problem) -> Iterator[dict[str, Any]]:
    """The least first: what was asked for at most in one respect."""
    constraints = problem.constraints
    if constraints.resident_layers is not None:
        for count in range(constraints.resident_layers - 1, -1, -1):
            yield {"dlo_resident_layers": count}
        yield {"dlo_resident_layers": None}
    if constraints.runtime_cache == "off":
        yield {"dlo_runtime_cache": "auto"}
    if problem.is_asked:
        others = [one for one in problem.free_strategies if one not in constraints.strategies]
        yield from ({"offload": one} for one in others)
        if constraints.resident_layers is not None:
            yield from ({"offload": one, "dlo_resident_layers": None} for one in others)
    for changes in ({}, {"offload": "auto", "dlo_resident_layers": None}):
        free = changed(problem, changes)
        host_bytes = problem.facts.host_free_bytes
        peaks = [
            free.needed_bytes(one)
            for one in free.candidates()
            if one.locking.host_bytes <= host_bytes
        ]
        if not peaks:
            continue
        wanted_gib = _rounded_up(min(peaks))
        if wanted_gib * GIB_BYTES <= problem.facts.free_bytes and problem.budget.is_set:
            yield {**changes, "memory_budget_gib": wanted_gib}
        total_bytes = problem.facts.taken_bytes + min(peaks)
        larger = {**changes, "device_memory_gib": _rounded_up(total_bytes)}
        yield larger
        if problem.budget.is_set:
            yield {**larger, "memory_budget_gib": wanted_gib}


def _rounded_up(nbytes: int) -> float:
    return round(math.ceil(nbytes / GIB_BYTES / STEP_GIB) * STEP_GIB, 2)


def _reason(problem: Problem, found: list[Candidate]) -> str:
    constraints = problem.constraints
    asked = f"offload {_asked(constraints)} " if problem.is_asked else ""
    if not found:
        return f"{asked}{_nothing_to_do(problem)}"
    smallest = min(found, key=problem.needed_bytes)
    needed_bytes = problem.needed_bytes(smallest)
    if needed_bytes <= problem.budget.limit_bytes:
        fitting = [one for one in found if problem.needed_bytes(one) <= problem.budget.limit_bytes]
        host_bytes = min(one.locking.host_bytes for one in fitting)
        return (
            f"{asked}needs {gib(host_bytes)} of host memory at least, of which "
            f"{gib(problem.facts.host_free_bytes)} are free"
        )
    phase = max(smallest.phases_bytes, key=lambda name: smallest.phases_bytes[name])
    activation_bytes = problem.work.activation_bytes(phase)
    return (
        f"{asked}needs {gib(needed_bytes)} of {problem.facts.label} at least (to {phase}: "
        f"{gib(smallest.peak_bytes - activation_bytes)} of weights and buffers, "
        f"{gib(activation_bytes)} of activations, {gib(needed_bytes - smallest.peak_bytes)} for "
        f"fragments); the budget is {problem.budget}"
    )


def _asked(constraints: Constraints) -> str:
    layers = constraints.resident_layers
    words = " or ".join(repr(name) for name in constraints.strategies)
    return words if layers is None else f"{words} with {layers} leading blocks resident"


def _nothing_to_do(problem: Problem) -> str:
    constraints = problem.constraints
    if constraints.resident_layers is not None and not set(constraints.strategies) & set(LAYERWISE):
        return "streams nothing, so dlo_resident_layers means nothing"
    if "model" in constraints.strategies and len(constraints.strategies) == 1:
        return "needs an encoder and a denoiser, or two denoisers, that take turns"
    obstacles = [
        f"{size.component}: {size.obstacle or 'no list of blocks is known'}"
        for size in problem.sizes.values()
        if not size.blocks and size.part not in FIXED_PARTS
    ]
    return "finds no block that could stream" + (f" ({'; '.join(obstacles)})" if obstacles else "")


def _word(name: str, value: Any) -> str:
    if name == "device_memory_gib":
        return f"a device of {value:g} GiB"
    if value is None:
        return f"{name} left out"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
