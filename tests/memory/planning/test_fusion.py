"""What compiled blocks hold: results that fused kernels never write take no memory."""

from __future__ import annotations

import pytest

from omnistage.memory.planning.fusion import Step, fused_peak_bytes

OUTSIDE, FIRST, SECOND, THIRD = -1, 1, 2, 3


def product(reads, writes, nbytes, **more):
    return Step(False, frozenset(reads), ((writes, nbytes),), **more)


def pointwise(reads, writes, nbytes, **more):
    return Step(True, frozenset(reads), ((writes, nbytes),), **more)


def test_what_only_pointwise_operations_read_is_never_written():
    steps = [
        pointwise([OUTSIDE], FIRST, 400),
        pointwise([FIRST], SECOND, 400),
        product([SECOND], THIRD, 100),
    ]
    assert fused_peak_bytes(steps, {THIRD}) == 500


def test_sources_live_until_what_is_computed_from_them():
    steps = [
        product([OUTSIDE], FIRST, 100),
        pointwise([FIRST], SECOND, 40),
        product([OUTSIDE], THIRD, 10),
        product([SECOND], 4, 1),
    ]
    late = [steps[0], steps[2], steps[1], steps[3]]
    assert fused_peak_bytes(steps, {THIRD, 4}) == 140
    assert fused_peak_bytes(late, {THIRD, 4}) == 150


def test_a_kernel_writes_over_an_input_that_nobody_needs_any_more():
    steps = [product([OUTSIDE], FIRST, 100), pointwise([FIRST], SECOND, 100)]
    steps.append(product([SECOND], THIRD, 10))
    assert fused_peak_bytes(steps, {THIRD}) == 110
    assert fused_peak_bytes(steps, {THIRD, FIRST}) == 210


def test_no_kernel_writes_over_what_it_reads_at_other_places():
    steps = [product([OUTSIDE], FIRST, 100)]
    steps.append(pointwise([FIRST], SECOND, 100, moved=frozenset((FIRST,))))
    steps.append(pointwise([SECOND], THIRD, 100))
    steps.append(product([THIRD], 4, 10))
    assert fused_peak_bytes(steps, {4}) == 200


@pytest.mark.parametrize(("sources", "peak"), [(4, 72), (5, 5 * 10 + 100)])
def test_what_is_costly_to_compute_twice_is_kept(sources, peak):
    """From four sources it is computed again, and never lies in memory."""
    made = [product([OUTSIDE], number, 10) for number in range(10, 10 + sources)]
    joined = pointwise(range(10, 10 + sources), FIRST, 100)
    uses = [pointwise([FIRST], SECOND, 1), product([SECOND], THIRD, 1)]
    again = [pointwise([FIRST], 4, 1), product([4], 5, 70)]
    assert fused_peak_bytes([*made, joined, *uses, *again], {THIRD, 5}) == peak


def test_what_an_operation_borrows_counts_while_it_runs():
    assert fused_peak_bytes([product([OUTSIDE], FIRST, 100, borrowed_bytes=7)], set()) == 107


def test_results_that_leave_the_block_are_written():
    assert fused_peak_bytes([pointwise([OUTSIDE], FIRST, 100)], {FIRST}) == 100
    assert fused_peak_bytes([pointwise([OUTSIDE], FIRST, 100)], set()) == 0
