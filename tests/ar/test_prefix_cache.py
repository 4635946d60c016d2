"""Equal prefixes are computed once; different media are different prefixes."""

from __future__ import annotations

import pytest

from omnistage.ar.prompt import MediaItem, PreparedPrompt
from omnistage.ar.step import StepOutcome, StepRow
from omnistage.contracts.errors import InvalidRequestError
from tests.ar.driver import Driver, token_options
from tests.ar.fake_executor import FakeExecutor, expected_tokens

PROMPT = list(range(1, 15))


def with_picture(digest: bytes, **changes: object) -> PreparedPrompt:
    item = MediaItem(kind="image", digest=digest, spans=((2, 6),), tensors={})
    return PreparedPrompt(token_ids=PROMPT, media=(item,), **changes)  # type: ignore[arg-type]


@pytest.mark.invariant("AR-INV-103")
def test_an_equal_prompt_starts_behind_its_full_blocks() -> None:
    driver = Driver()
    first = driver.add("a", PROMPT, max_tokens=3)
    driver.run()
    second = driver.add("b", PROMPT, max_tokens=3)
    driver.run()
    assert first.last["cached_tokens"] == 0
    assert second.last["cached_tokens"] == 12
    assert second.token_ids == first.token_ids == expected_tokens(PROMPT, 3)
    stats = driver.scheduler.stats()
    assert (stats["prefix_hits"], stats["prefix_queries"]) == (3, 6)


def test_what_was_generated_is_found_by_the_next_turn() -> None:
    driver = Driver()
    first = driver.add("a", PROMPT, max_tokens=8)
    driver.run()
    second = driver.add("b", [*PROMPT, *first.token_ids, 5], max_tokens=2)
    driver.run()
    assert second.last["cached_tokens"] == 20


def test_a_prompt_of_full_blocks_still_computes_its_last_token() -> None:
    driver = Driver()
    driver.add("a", PROMPT[:12], max_tokens=2)
    driver.run()
    again = driver.add("b", PROMPT[:12], max_tokens=2)
    driver.run()
    assert again.last["cached_tokens"] == 8


def test_off_is_off_and_reset_forgets() -> None:
    driver = Driver(token_options(enable_prefix_caching=False))
    for name in "ab":
        heard = driver.add(name, PROMPT, max_tokens=2)
        driver.run()
    assert heard.last["cached_tokens"] == 0
    assert driver.scheduler.stats()["prefix_queries"] == 0
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=2)
    driver.run()
    driver.scheduler.controls()["reset_prefix_cache"]()
    heard = driver.add("b", PROMPT, max_tokens=2)
    driver.run()
    assert heard.last["cached_tokens"] == 0


@pytest.mark.invariant("AR-INV-103")
def test_media_are_encoded_once_and_not_at_all_when_their_blocks_are_cached() -> None:
    prompts = {
        "cat": with_picture(b"cat"),
        "cat2": with_picture(b"cat"),
        "dog": with_picture(b"dog"),
        "secret": with_picture(b"cat", salt=b"s"),
        "own": with_picture(b"cat", cacheable=False),
    }
    driver = Driver(executor=FakeExecutor(prompts=prompts))
    cached = {}
    for name in prompts:
        heard = driver.add(name, max_tokens=2)
        driver.run()
        cached[name] = heard.last["cached_tokens"]
    assert cached == {"cat": 0, "cat2": 12, "dog": 0, "secret": 0, "own": 0}
    assert driver.executor.encoded == ["cat", "dog", "secret", "own"]


def test_between_two_encodings_those_that_run_take_a_step() -> None:
    prompts = {f"p{n}": with_picture(b"%d" % n) for n in range(4)}
    driver = Driver(executor=FakeExecutor(prompts=prompts))
    driver.add("runs", [1], max_tokens=30)
    for _ in range(4):
        driver.step()
    steps = len(driver.executor.plans)
    for name in prompts:
        driver.add(name, max_tokens=1)
    while len(driver.executor.encoded) < 4:
        driver.step()
    assert len(driver.executor.plans) - steps >= 3


@pytest.mark.invariant("AR-INV-103")
@pytest.mark.parametrize("lag", [0, 1])
def test_siblings_that_come_together_compute_their_prompt_once(lag: int) -> None:
    """Those behind them do not wait meanwhile."""
    driver = Driver(token_options(max_num_batched_tokens=32), FakeExecutor(lag=lag))
    prompt = [*PROMPT, *PROMPT, *PROMPT]
    siblings = [driver.add(f"s{n}", prompt, max_tokens=4) for n in range(4)]
    other = driver.add("other", [50] * 6, max_tokens=4)
    driver.run()
    assert all(one.token_ids == expected_tokens(prompt, 4) for one in siblings)
    assert [one.last["cached_tokens"] for one in siblings] == [0, 40, 40, 40]
    rows = [row for plan in driver.executor.plans for row in plan.rows]
    computed = sum(row.count for row in rows if not row.decodes)
    assert computed == 42 + 3 * 2 + 6
    begun = [row.identity.request_id for row in rows if row.begin is not None]
    assert begun[:2] == ["s0", "other"]
    assert other.finish_reason == "length"


@pytest.mark.invariant("AR-INV-103")
def test_a_sibling_whose_elder_is_aborted_computes_the_prompt_itself() -> None:
    driver = Driver(token_options(max_num_batched_tokens=16))
    driver.add("elder", PROMPT * 3, max_tokens=4)
    sibling = driver.add("sibling", PROMPT * 3, max_tokens=4)
    for _ in range(4):
        driver.step()
    driver.abort("elder")
    driver.run()
    assert sibling.token_ids == expected_tokens(PROMPT * 3, 4)
    driver.assert_nothing_held()


class Refusing(FakeExecutor):
    """Takes nothing in of a request "refused": its rows are not computed."""

    def _run(self, row: StepRow, outcome: StepOutcome) -> None:
        if row.identity.request_id == "refused":
            outcome.errors[row.identity.key] = InvalidRequestError("it has too many stop ids")
        else:
            super()._run(row, outcome)


@pytest.mark.invariant("AR-INV-103")
@pytest.mark.parametrize("lag", [0, 1])
def test_nobody_starts_from_blocks_of_a_row_that_was_not_computed(lag: int) -> None:
    driver = Driver(executor=Refusing(lag=lag))
    refused = driver.add("refused", PROMPT, max_tokens=3)
    driver.run()
    assert isinstance(refused.error, InvalidRequestError)
    other = driver.add("other", PROMPT, max_tokens=3)
    driver.run()
    assert other.last["cached_tokens"] == 0
    assert other.token_ids == expected_tokens(PROMPT, 3)
    driver.assert_nothing_held()
