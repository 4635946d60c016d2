"""Residents fit their budget and are spread."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.memory.offload.residency import (
    interleaved_residents,
    largest_streamed_run_bytes,
    leading_residents,
)

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=9)


@pytest.mark.invariant("OFFLOAD-INV-007")
@given(sizes=SIZES, part=st.floats(0, 1))
def test_the_longest_run_is_as_short_as_can_be(sizes, part):
    budget_bytes = int(part * sum(sizes))
    chosen = interleaved_residents(sizes, budget_bytes)
    used_bytes = sum(sizes[index] for index in chosen)
    assert used_bytes <= budget_bytes
    assert chosen == tuple(sorted(set(chosen)))
    streamed = [size for index, size in enumerate(sizes) if index not in chosen]
    assert all(size > budget_bytes - used_bytes for size in streamed)
    best = min(
        largest_streamed_run_bytes(sizes, some)
        for count in range(len(sizes) + 1)
        for some in itertools.combinations(range(len(sizes)), count)
        if sum(sizes[index] for index in some) <= budget_bytes
    )
    assert largest_streamed_run_bytes(sizes, chosen) == best


@pytest.mark.invariant("OFFLOAD-INV-007")
@pytest.mark.parametrize("count", [1, 6, 20, 30, 45, 54, 59])
def test_equal_blocks_are_spread_evenly(count):
    chosen = interleaved_residents([100] * 60, 100 * count + 99)
    assert len(chosen) == count
    for indices in (chosen, [index for index in range(60) if index not in chosen]):
        ahead = [*indices[1:], indices[0] + 60]
        gaps = {after - before for before, after in zip(indices, ahead, strict=True)}
        assert max(gaps) - min(gaps) <= 1


def test_extremes():
    assert interleaved_residents([], 5) == ()
    assert interleaved_residents([3, 4], 2) == ()
    assert interleaved_residents([3, 4], 7) == (0, 1)
    assert largest_streamed_run_bytes([3, 4], ()) == 7
    assert leading_residents(3, 2) == (0, 1)
    assert leading_residents(3, 9) == (0, 1, 2)
