"""When blocks run out: who gives way, what starts over, and that somebody always gets on."""

from __future__ import annotations

import pytest

from omnistage.contracts.errors import InvalidRequestError, OverloadedError
from tests.ar.driver import Driver, token_options
from tests.ar.fake_executor import FakeExecutor, expected_tokens


@pytest.mark.invariant("AR-INV-105")
@pytest.mark.parametrize("lag", [0, 1])
def test_the_latest_gives_way_and_the_first_never_does(lag: int) -> None:
    driver = Driver(executor=FakeExecutor(num_blocks=12, lag=lag))
    heard = [driver.add(f"r{n}", [n + 1] * 6, max_tokens=30) for n in range(3)]
    driver.run()
    assert [one.token_ids for one in heard] == [expected_tokens([n + 1] * 6, 30) for n in range(3)]
    restarted = [
        row.identity.request_id
        for plan in driver.executor.plans
        for row in plan.rows
        if row.restart is not None
    ]
    assert restarted
    assert "r0" not in restarted
    assert driver.scheduler.stats()["preemptions"] == len(restarted)
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-105")
def test_priority_decides_before_arrival() -> None:
    driver = Driver(token_options(max_num_seqs=1), FakeExecutor(max_num_seqs=1))
    driver.add("first", max_tokens=3)
    driver.add("late", max_tokens=3)
    driver.add("urgent", max_tokens=3, priority=1)
    driver.run()
    begun = [
        row.identity.request_id
        for plan in driver.executor.plans
        for row in plan.rows
        if row.begin is not None
    ]
    assert begun == ["urgent", "first", "late"]


@pytest.mark.invariant("AR-INV-105")
def test_places_are_never_more_than_asked_for() -> None:
    """The fake executor has as many device rows as places, and complains."""
    driver = Driver(token_options(max_num_seqs=3), FakeExecutor(max_num_seqs=3, num_blocks=9))
    heard = [driver.add(f"r{n}", [n + 1] * 5, max_tokens=9) for n in range(8)]
    driver.run()
    assert all(one.finish_reason == "length" for one in heard)
    assert max(len(plan.rows) for plan in driver.executor.plans) == 3


@pytest.mark.invariant("AR-INV-105")
def test_what_can_never_fit_is_refused_with_the_limit() -> None:
    driver = Driver(executor=FakeExecutor(num_blocks=4, block_size=4))
    fits, long, greedy = (
        driver.add("fits", [1] * 5, max_tokens=8),
        driver.add("long", [1] * 13),
        driver.add("greedy", [1] * 5, max_tokens=9),
    )
    driver.run()
    assert fits.token_ids == expected_tokens([1] * 5, 8)
    for refused, words in ((long, "the KV cache holds 12"), (greedy, "there is room for 8")):
        assert isinstance(refused.error, InvalidRequestError)
        assert words in refused.error.message
    driver.assert_nothing_held()


def test_without_chunks_a_prompt_over_the_budget_is_refused() -> None:
    options = token_options(enable_chunked_prefill=False, max_num_batched_tokens=16)
    driver = Driver(options)
    refused, served = driver.add("a", [1] * 17, max_tokens=2), driver.add("b", [1] * 16)
    driver.run()
    assert refused.error is not None
    assert "at most max_num_batched_tokens 16" in refused.error.message
    assert served.finish_reason == "length"


@pytest.mark.invariant("AR-INV-108")
def test_without_chunks_a_whole_prompt_comes_before_decode_steps_that_leave_no_room() -> None:
    options = token_options(enable_chunked_prefill=False, max_num_batched_tokens=16)
    driver = Driver(options)
    long_running = [driver.add(f"r{n}", [n + 1], max_tokens=40) for n in range(4)]
    for _ in range(6):
        driver.step()
    whole = driver.add("whole", [9] * 16, max_tokens=2)
    for _ in range(8):
        driver.step()
    assert whole.ended, "it did not wait for the others to end"
    assert not any(one.ended for one in long_running)
    rows = [row for plan in driver.executor.plans for row in plan.rows]
    assert [r.count for r in rows if r.identity.request_id == "whole"] == [16, 1]


@pytest.mark.invariant("AR-INV-108")
def test_chunks_ride_beside_decode_steps() -> None:
    driver = Driver(token_options(max_num_batched_tokens=12))
    running = driver.add("running", [1], max_tokens=40)
    for _ in range(4):
        driver.step()
    driver.add("long", [2] * 30, max_tokens=2)
    before = len(running.token_ids)
    for _ in range(4):
        driver.step()
    assert len(running.token_ids) >= before + 3, "nobody waits for a long prompt"
    counts = [
        row.count
        for plan in driver.executor.plans
        for row in plan.rows
        if row.identity.request_id == "long"
    ]
    assert counts[:3] == [11, 11, 8]


@pytest.mark.invariant("AR-INV-108")
def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    driver = Driver(token_options(max_num_batched_tokens=16))
    long, short = driver.add("long", [1] * 90, max_tokens=1), driver.add("short", [2] * 6)
    while not short.emissions:
        assert driver.step()
    assert not long.emissions
    assert len(driver.executor.plans) <= 2


@pytest.mark.invariant("AR-INV-104")
def test_admission_is_bounded() -> None:
    driver = Driver(token_options(max_queued_requests=2))
    driver.add("a")
    driver.add("b")
    with pytest.raises(OverloadedError, match="2 requests wait"):
        driver.add("c")
    driver.run()
    assert driver.add("d", max_tokens=1)
    driver.run()
    driver.heard.pop(("c", 0))
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-106")
@pytest.mark.parametrize("turns", range(12))
def test_an_abort_frees_blocks_also_while_steps_are_in_flight(turns: int) -> None:
    """The blocks come back when the step in flight is collected, never before: otherwise what it
    writes would be in somebody else's blocks, and the fake executor would see it."""
    driver = Driver(executor=FakeExecutor(num_blocks=10, lag=1))
    driver.add("a", [1] * 9, max_tokens=20)
    for _ in range(turns):
        driver.step()
    if ("a", 0) in driver.heard:
        driver.abort("a")
    other = driver.add("b", [2] * 12, max_tokens=20)
    driver.run()
    assert other.token_ids == expected_tokens([2] * 12, 20)
    driver.assert_nothing_held()
