"""How the tokens of one step are shared among prompts."""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens of each prompt in the next step, best first. One that would take all leaves half to
    those behind it; what they do not need is its own again."""
    shares: list[int] = []
    left = budget
    for index, wanted in enumerate(remaining):
        is_last = index == len(remaining) - 1
        most = left if is_last else -(-left // 2)
        shares.append(min(wanted, most))
        left -= shares[-1]
    for index, wanted in enumerate(remaining):
        more = min(wanted - shares[index], left)
        shares[index] += more
        left -= more
    return shares


def first_come(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens of each prompt in the next step: all of it, as far as the budget goes."""
    shares: list[int] = []
    for wanted in remaining:
        shares.append(min(wanted, budget))
        budget -= shares[-1]
    return shares


def has_share_left(remaining: Sequence[int], budget: int) -> bool:
    """Whether one more prompt would get a share of any size: an eighth of the budget."""
    left = budget
    for wanted in remaining:
        left -= min(wanted, -(-left // 2))
    return left > budget // 8
