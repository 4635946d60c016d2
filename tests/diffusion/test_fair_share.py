"""Turns on a shared device."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.diffusion.fair_share import FairShare


def turn(share: FairShare, shapes: dict[str, int], costs: dict[str, float]) -> str:
    """The shape that runs, all of it at once. Ties go to the first in the alphabet."""
    shape = share.next(shapes, tie=lambda shape: shape)
    share.charge(shape, costs[shape] * shapes[shape], shapes)
    return shape


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
def test_newcomers_without_end_do_not_keep_a_dear_shape_waiting():
    """One cheap shape is always about to leave and another has just come: the least that anybody
    has had would never grow."""
    share = FairShare()
    dear_turns = []
    for number in range(400):
        cheap = [f"x{number:04}", f"x{number + 1:04}"]
        costs = {"dear": 30.0} | dict.fromkeys(cheap, 1.0)
        if turn(share, dict.fromkeys(costs, 1), costs) == "dear":
            dear_turns.append(number)
    gaps = [later - earlier for earlier, later in pairwise(dear_turns)]
    assert gaps
    assert max(gaps) <= 3 * 30 + 3 * 31


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
@settings(deadline=None)
@given(
    crowd=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=2),
    costs=st.fixed_dictionaries(dict.fromkeys("abcd", st.integers(1, 9))),
    turns=st.integers(1, 100),
)
def test_each_request_has_had_the_same_within_one_step(crowd, costs, turns):
    share, had = FairShare(), Counter(dict.fromkeys(crowd, 0))
    for _ in range(turns):
        shape = turn(share, crowd, costs)
        had[shape] += costs[shape]
    assert max(had.values()) - min(had.values()) <= max(costs[shape] for shape in crowd)


def test_one_that_comes_late_is_owed_nothing():
    share = FairShare()
    costs = {"a": 1.0, "b": 1.0}
    for _ in range(50):
        turn(share, {"a": 1}, costs)
    turns = [turn(share, {"a": 1, "b": 1}, costs) for _ in range(10)]
    assert turns.count("a") == turns.count("b") == 5


def test_one_that_comes_back_owes_nothing():
    share = FairShare()
    costs = {"a": 1.0, "b": 1.0}
    for _ in range(9):
        turn(share, {"a": 1, "b": 1}, costs)
    for _ in range(50):
        turn(share, {"b": 1}, costs)
    turns = [turn(share, {"a": 1, "b": 1}, costs) for _ in range(10)]
    assert turns.count("a") == turns.count("b") == 5
