"""The ring on paper: never faster than the link or the arithmetic, and residents spread."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.memory.offload.residency import interleaved_residents, leading_residents
from omnistage.memory.planning.ring_time import TimedBlock, cold_time_s, pass_time_s

blocks = st.lists(
    st.builds(
        TimedBlock,
        compute_s=st.floats(0.001, 1),
        copy_s=st.one_of(st.just(0.0), st.floats(0.001, 1)),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.invariant("PLAN-INV-004")
@settings(max_examples=200, deadline=None)
@given(blocks, st.floats(0, 0.5))
def test_a_pass_takes_between_the_longer_and_the_sum(chosen, rest_s):
    compute_s = rest_s + sum(block.compute_s for block in chosen)
    copy_s = sum(block.copy_s for block in chosen)
    found_s = pass_time_s(chosen, rest_s)
    assert found_s <= (compute_s + copy_s) * (1 + 1e-9)
    assert found_s >= compute_s * (1 - 1e-9)


def test_even_blocks_run_at_the_rate_of_the_link():
    assert pass_time_s([TimedBlock(compute_s=1, copy_s=3)] * 6) == pytest.approx(18)
    assert pass_time_s([TimedBlock(compute_s=3, copy_s=1)] * 6) == pytest.approx(18)


@pytest.mark.invariant("PLAN-INV-004")
def test_spread_residents_are_faster_than_leading_ones():
    sizes = [1] * 20

    def timed(kept):
        return pass_time_s(
            [TimedBlock(compute_s=1, copy_s=0 if i in kept else 2) for i in range(20)]
        )

    spread, leading = interleaved_residents(sizes, 10), leading_residents(20, 10)
    assert timed(spread) == pytest.approx(20)
    assert timed(leading) > 1.3 * timed(spread)


def test_a_first_pass_waits_for_its_first_copy():
    blocks = [TimedBlock(compute_s=1, copy_s=1)] * 4
    assert cold_time_s(blocks, 0, 1) == pytest.approx(5)
    assert cold_time_s(blocks, 0, 2) == pytest.approx(9)
