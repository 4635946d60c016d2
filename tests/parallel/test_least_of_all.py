"""Ranks plan alike though each finds another amount of free memory."""

from __future__ import annotations

import pytest

from omnistage.parallel.agreement import least_of_all
from tests.memory.offload.ranks import Rank, on_ranks


def of_both(rank: Rank) -> tuple[int, ...]:
    free = ((2**40 + 3, 7), (2**40 + 2, 9))[rank.number]
    return least_of_all(rank.groups, *free)


@pytest.mark.invariant("PARALLEL-INV-003")
def test_every_rank_gets_the_least_of_each_value():
    assert on_ranks(of_both) == [(2**40 + 2, 7)] * 2
