"""Failed commands: who fails, who starts over, and that the others get their tokens."""

from __future__ import annotations

from typing import Any

import pytest

from omnistage.ar.prompt import MediaItem, PreparedPrompt
from omnistage.ar.step import StepPlan
from omnistage.contracts.errors import InternalError, OutOfMemoryError
from tests.ar.driver import Driver, token_options
from tests.ar.fake_executor import FakeExecutor, expected_tokens


def poisoned_by(name: str, least_rows: int = 1) -> Any:
    def fails(plan: StepPlan) -> bool:
        names = [row.identity.request_id for row in plan.rows]
        return name in names and len(names) >= least_rows

    return fails


@pytest.mark.invariant("AR-INV-110")
@pytest.mark.parametrize("lag", [0, 1])
def test_one_that_makes_steps_fail_fails_alone(lag: int) -> None:
    driver = Driver(executor=FakeExecutor(lag=lag))
    heard = {f"r{n}": driver.add(f"r{n}", [n + 1] * 4, max_tokens=12) for n in range(4)}
    for _ in range(5):
        driver.step()
    driver.executor.fail_if = poisoned_by("r2")
    driver.run()
    assert isinstance(heard.pop("r2").error, InternalError)
    for n in (0, 1, 3):
        assert heard[f"r{n}"].token_ids == expected_tokens([n + 1] * 4, 12)
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-110")
@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_that_failed_for_no_lasting_reason_costs_nobody(lag: int) -> None:
    driver = Driver(executor=FakeExecutor(lag=lag))
    heard = [driver.add(f"r{n}", [n + 1] * 4, max_tokens=12) for n in range(4)]
    for turn in range(7):
        if turn == 5:
            driver.executor.fail_steps = [InternalError("a hiccup")]
        driver.step()
    driver.run()
    for n, one in enumerate(heard):
        assert one.token_ids == expected_tokens([n + 1] * 4, 12)
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-110")
@pytest.mark.parametrize("lag", [0, 1])
def test_after_running_out_of_memory_steps_are_smaller(lag: int) -> None:
    options = token_options(max_num_batched_tokens=64)
    driver = Driver(options, FakeExecutor(lag=lag))

    def too_large(plan: StepPlan) -> bool:
        if plan.num_tokens > 20:
            raise OutOfMemoryError("it does not fit")
        return False

    driver.executor.fail_if = too_large
    heard = [driver.add(f"r{n}", [n + 1] * 40, max_tokens=6) for n in range(3)]
    driver.run()
    for n, one in enumerate(heard):
        assert one.token_ids == expected_tokens([n + 1] * 40, 6)
    driver.executor.fail_if = None
    driver.add("later", [9] * 50, max_tokens=1)
    driver.run()
    assert max(plan.num_tokens for plan in driver.executor.plans[-2:]) == 50
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-110")
def test_a_single_request_that_never_fits_fails_and_the_stage_serves_on() -> None:
    driver = Driver(token_options(max_num_batched_tokens=64))
    heard = driver.add("a", [1] * 40, max_tokens=6)
    driver.executor.fail_steps = [OutOfMemoryError("no") for _ in range(5)]
    driver.run()
    assert isinstance(heard.error, OutOfMemoryError)
    driver.executor.fail_steps = []
    other = driver.add("b", [1] * 40, max_tokens=6)
    driver.run()
    assert other.token_ids == expected_tokens([1] * 40, 6)
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-110")
def test_those_that_start_over_have_their_media_again() -> None:
    item = MediaItem(kind="image", digest=b"cat", spans=((0, 3),), tensors={})
    prompt = PreparedPrompt(token_ids=[1, 2, 3, 4, 5], media=(item,), cacheable=False)
    driver = Driver(executor=FakeExecutor(prompts={"a": prompt}))
    heard = driver.add("a", max_tokens=4)
    other = driver.add("b", max_tokens=4)
    for _ in range(4):
        driver.step()
    driver.executor.fail_steps = [InternalError("a hiccup")]
    driver.run()
    assert heard.token_ids == expected_tokens([1, 2, 3, 4, 5], 4)
    assert other.token_ids == expected_tokens([1, 2, 3], 4)
    assert driver.executor.encoded == ["a", "a"]


@pytest.mark.invariant("AR-INV-110")
@pytest.mark.parametrize("lag", [0, 1])
def test_payloads_are_never_built_twice(lag: int) -> None:
    """What has sent payloads cannot start over unnoticed: it fails, others do not."""
    options = token_options(feeds_stages=True, emits_payload=True)
    driver = Driver(options, FakeExecutor(lag=lag))
    feeding = driver.add("feeding", [1, 2], max_tokens=9)
    plain = driver.add("plain", [3, 4], max_tokens=9, fields={"output_modalities": ["text"]})
    for _ in range(5):
        driver.step()
    driver.executor.fail_steps = [InternalError("a hiccup")]
    driver.run()
    assert isinstance(feeding.error, InternalError)
    assert plain.token_ids == expected_tokens([3, 4], 9)
    driver.assert_nothing_held()


def test_a_prompt_that_cannot_be_prepared_fails_its_child_only() -> None:
    driver = Driver()
    bad, good = driver.add("bad", [1000]), driver.add("good", max_tokens=2)
    driver.run()
    assert bad.error is not None
    assert "none of the vocabulary" in bad.error.message
    assert good.finish_reason == "length"


def test_a_stage_that_cannot_describe_itself_is_lost() -> None:
    driver = Driver()
    command = driver.scheduler.next_command()
    assert command is not None
    with pytest.raises(InternalError, match="no cache"):
        driver.scheduler.fail(command, InternalError("no cache"))


def test_parameters_are_held_against_the_vocabulary_before_and_after_it_is_known() -> None:
    driver = Driver()
    early = driver.add("early", stop_token_ids=[96])
    refused = driver.add("refused", stop_token_ids=[97], max_tokens=1)
    driver.run()
    assert early.error is None
    assert refused.error is not None
    assert refused.error.param == "stop_token_ids"
    with pytest.raises(ValueError, match="token ids are 0 to 96"):
        driver.add("late", stop_token_ids=[97])
