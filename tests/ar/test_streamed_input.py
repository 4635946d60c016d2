"""Input that comes in parts: when a stage starts on it, and how far decoding may run ahead."""

from __future__ import annotations

from typing import Any

import pytest

from omnistage.ar.prompt import PreparedPrompt
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from tests.ar.driver import Driver, token_options
from tests.ar.fake_executor import FakeExecutor, expected_tokens

IDENTITY = RequestIdentity(request_id="a")


def part(*ids: int, **fields: Any) -> StageData:
    return StageData(modality=Modality.TOKENS, fields={"token_ids": list(ids), **fields})


def paced(offset: int | None = 1, lag: int = 0, **options: Any) -> Driver:
    prompt = PreparedPrompt(token_ids=[1, 2, 3], conditioning_offset=offset, cacheable=False)
    executor = FakeExecutor(prompts={"a": prompt}, lag=lag)
    return Driver(token_options(entry=False, **options), executor)


@pytest.mark.invariant("AR-INV-111")
@pytest.mark.parametrize("lag", [0, 1])
def test_decode_step_k_waits_for_k_plus_offset_ids(lag: int) -> None:
    driver = paced(offset=1, lag=lag)
    heard = driver.add("a", max_tokens=9, input_complete=False, fields={"token_ids": [50]})
    driver.run()
    assert len(heard.token_ids) == 2, "the prompt's own token, and step 0"
    driver.scheduler.append_input(IDENTITY, part(51, 52), 0)
    driver.run()
    assert len(heard.token_ids) == 4
    driver.scheduler.end_input(IDENTITY, 0)
    driver.run()
    assert heard.token_ids == expected_tokens([1, 2, 3], 9)
    rows = [row for plan in driver.executor.plans for row in plan.rows]
    assert [one.fields["token_ids"] for row in rows for one in row.appended] == [[51, 52]]
    assert [row.input_complete for row in rows] == [False] * 4 + [True] * 5
    driver.assert_nothing_held()


def test_without_an_offset_nothing_is_waited_for() -> None:
    driver = paced(offset=None)
    heard = driver.add("a", max_tokens=5, input_complete=False)
    driver.run()
    assert heard.ended


@pytest.mark.invariant("AR-INV-111")
def test_a_prompt_waits_for_the_ids_that_it_is_made_of() -> None:
    driver = paced(min_input_tokens=2)
    heard = driver.add("a", max_tokens=3, input_complete=False, fields={"token_ids": [50]})
    driver.run()
    assert not heard.token_ids
    driver.scheduler.append_input(IDENTITY, part(51), 0)
    driver.run()
    assert len(heard.token_ids) == 3
    first = driver.executor.plans[0].rows[0]
    assert [one.fields["token_ids"] for one in first.appended] == [[51]]


def test_a_prompt_waits_for_no_more_than_there_will_be() -> None:
    driver = paced(min_input_tokens=2)
    heard = driver.add("a", max_tokens=3, input_complete=False, fields={"token_ids": [50]})
    driver.scheduler.end_input(IDENTITY, 0)
    driver.run()
    assert heard.ended


@pytest.mark.invariant("AR-INV-111")
def test_full_payload_mode_waits_for_all_input() -> None:
    driver = paced(async_chunk=False)
    heard = driver.add("a", max_tokens=3, input_complete=False, fields={"token_ids": [50]})
    driver.run()
    driver.scheduler.append_input(IDENTITY, part(51), 0)
    driver.run()
    assert not driver.executor.plans
    driver.scheduler.end_input(IDENTITY, 0)
    driver.run()
    assert heard.ended
    first = driver.executor.plans[0].rows[0]
    assert first.input_complete
    assert [one.fields["token_ids"] for one in first.appended] == [[51]]


@pytest.mark.invariant("AR-INV-111")
def test_a_preempted_sequence_keeps_its_streamed_input() -> None:
    driver = paced(offset=0)
    driver.executor.num_blocks = 7
    heard = driver.add("a", max_tokens=15, input_complete=False)
    other = driver.add("b", [9] * 4, max_tokens=16, priority=1)
    for turn in range(40):
        driver.step()
        if turn % 2:
            driver.scheduler.append_input(IDENTITY, part(turn), 0)
    driver.scheduler.end_input(IDENTITY, 0)
    driver.run()
    assert driver.scheduler.stats()["preemptions"] > 0
    assert heard.token_ids == expected_tokens([1, 2, 3], 15)
    assert other.token_ids == expected_tokens([9] * 4, 16)


def test_a_users_input_is_prepared_when_all_of_it_is_there() -> None:
    driver = Driver()
    heard = driver.add("a", [1, 2], max_tokens=3, input_complete=False)
    driver.run()
    assert not driver.executor.plans
    driver.scheduler.append_input(IDENTITY, part(prompt_token_ids=[3, 4]), 0)
    driver.scheduler.end_input(IDENTITY, 0)
    driver.run()
    assert heard.token_ids == expected_tokens([1, 2, 3, 4], 3)


def test_superseded_input_is_replaced_before_the_start_and_refused_after() -> None:
    driver = Driver()
    heard = driver.add("a", [1, 2], max_tokens=3, input_complete=False)
    driver.scheduler.append_input(IDENTITY, part(prompt_token_ids=[7]), 1)
    driver.scheduler.append_input(IDENTITY, part(prompt_token_ids=[8]), 0)
    driver.scheduler.end_input(IDENTITY, 1)
    driver.step()
    driver.step()
    with pytest.raises(InvalidRequestError, match="was superseded"):
        driver.scheduler.append_input(IDENTITY, part(prompt_token_ids=[9]), 2)
    driver.run()
    assert heard.token_ids == expected_tokens([7], 3)


def test_input_of_another_kind_does_not_continue() -> None:
    driver = Driver()
    driver.add("a", [1, 2], input_complete=False)
    with pytest.raises(InvalidRequestError, match="continued by a str"):
        driver.scheduler.append_input(IDENTITY, part(prompt_token_ids="x"), 0)
