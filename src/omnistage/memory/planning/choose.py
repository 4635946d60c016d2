"""The choice among candidates within a budget."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.memory.offload.base import STRATEGIES
from omnistage.memory.planning.candidates import Candidate
from omnistage.memory.planning.refusal import Problem, Refusal, refuse
from omnistage.memory.planning.work import PHASES

BALANCED_SHARE = 0.10
"""Of the budget that `balanced` leaves free, or room for a second request of the shape, whichever
is more."""

AUTO_SHARE = 0.05
"""Of the budget that `auto` leaves free: fragments of the allocator, an adapter."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`headroom_bytes` is what was to stay free; `is_short`: less stays free."""

    candidate: Candidate
    headroom_bytes: int
    is_short: bool


def choose(problem: Problem) -> Choice | Refusal:
    """`speed`: the fastest that fits. `minimal`: the smallest. `balanced` and `auto`: the fastest
    that leaves their headroom, else the smallest. Of equally fast ones the one with most resident.
    """
    possible = problem.possible
    if not possible:
        return refuse(problem)
    smallest = min(possible, key=lambda one: (one.peak_bytes, one.request_s))
    if problem.memory == "minimal":
        return Choice(candidate=smallest, headroom_bytes=0, is_short=False)
    headroom_bytes = headroom(problem)
    limit_bytes = problem.budget.limit_bytes - headroom_bytes
    roomy = [one for one in possible if problem.needed_bytes(one) <= limit_bytes]
    fastest = min(roomy, key=_by_speed, default=smallest)
    return Choice(candidate=fastest, headroom_bytes=headroom_bytes, is_short=not roomy)


def _by_speed(one: Candidate) -> tuple[float, int, int]:
    """Times of six digits, so that those summed in another order are equal."""
    return float(f"{one.request_s:.6g}"), STRATEGIES.index(one.strategy), -one.peak_bytes


def headroom(problem: Problem) -> int:
    """Bytes that the mode leaves free."""
    budget_bytes = problem.budget.limit_bytes
    if problem.memory == "balanced":
        second_bytes = max(problem.work.activation_bytes(phase) for phase in PHASES)
        return max(int(budget_bytes * BALANCED_SHARE), second_bytes)
    return int(budget_bytes * AUTO_SHARE) if problem.memory == "auto" else 0
