"""Shares of a step's tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.ar.budget import first_come, has_share_left, share_budget


@pytest.mark.invariant("AR-INV-108")
@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 100))
def test_shares_use_the_budget_and_no_more(remaining: list[int], budget: int) -> None:
    for shares in (share_budget(remaining, budget), first_come(remaining, budget)):
        assert sum(shares) == min(sum(remaining), budget)
        assert all(0 <= share <= most for share, most in zip(shares, remaining, strict=True))


@pytest.mark.invariant("AR-INV-108")
def test_a_long_prompt_leaves_half_to_short_ones() -> None:
    assert share_budget([1000, 10, 10], 100) == [80, 10, 10]
    assert share_budget([1000, 1000], 100) == [50, 50]
    assert share_budget([1000], 100) == [100]
    assert share_budget([10, 1000], 100) == [10, 90]
    assert first_come([90, 20], 100) == [90, 10]


def test_prompts_are_admitted_while_a_share_is_left() -> None:
    assert has_share_left([], 80)
    assert has_share_left([1000, 1000], 80)
    assert not has_share_left([1000, 1000, 1000], 80)
    assert has_share_left([5] * 13, 80)
    assert not has_share_left([5] * 14, 80)
    assert not has_share_left([], 0)
