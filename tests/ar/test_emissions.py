"""What leaves when: first and final at once, the rest as readers and payloads allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omnistage.ar.emission import join_tensors
from omnistage.ar.output import EMISSIONS_PER_STEP
from omnistage.ar.planner import MAX_PENDING_TOKENS
from omnistage.contracts.errors import InternalError
from omnistage.contracts.modalities import Modality
from tests.ar.driver import Driver, Heard, token_options
from tests.ar.fake_executor import EOS, FakeExecutor, expected_tokens


def feeding(**changes: Any) -> Any:
    return token_options(feeds_stages=True, emits_payload=True, **changes)


def fed(heard: Heard) -> list[int]:
    parts = [one.data.tensors["fed"] for one in heard.emissions if one.data and one.data.tensors]
    return np.concatenate(parts)[:, 0].tolist()


@pytest.mark.invariant("AR-INV-107")
def test_without_credits_output_is_kept_and_merged() -> None:
    driver = Driver()
    heard = driver.add("a", max_tokens=10, credits=1)
    driver.run()
    assert len(heard.emissions) == 1
    assert len(heard.token_ids) == 1
    driver.acknowledge("a")
    driver.run()
    assert [len(one.data.fields["token_ids"]) for one in heard.emissions if one.data] == [1, 9]
    assert heard.emissions[-1].final
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-107")
def test_one_that_nobody_reads_pauses_and_goes_on() -> None:
    driver = Driver(executor=FakeExecutor(num_blocks=256, max_model_len=2000))
    heard = driver.add("a", max_tokens=600, credits=1)
    driver.run()
    computed = sum(row.samples for plan in driver.executor.plans for row in plan.rows)
    assert computed == MAX_PENDING_TOKENS + 1
    driver.acknowledge("a", 1000)
    driver.run()
    assert heard.token_ids == expected_tokens([1, 2, 3], 600)
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-107")
def test_many_running_requests_are_coalesced_and_none_is_forgotten() -> None:
    options = token_options(max_num_seqs=40, max_num_batched_tokens=256)
    driver = Driver(options, FakeExecutor(num_blocks=400, max_num_seqs=40))
    heard = [driver.add(f"r{n}", [n + 1], max_tokens=20) for n in range(40)]
    while not all(one.emissions for one in heard):
        driver.step()
    before = [len(one.emissions) for one in heard]
    driver.step()
    step = sum(len(one.emissions) for one in heard) - sum(before)
    assert step == EMISSIONS_PER_STEP
    for _ in range(2):
        driver.step()
    assert all(len(one.emissions) > count for one, count in zip(heard, before, strict=True))
    driver.run()
    for n, one in enumerate(heard):
        assert one.token_ids == expected_tokens([n + 1], 20)


def test_without_delta_everything_comes_at_the_end() -> None:
    driver = Driver()
    heard = driver.add("a", max_tokens=10, delta=False)
    driver.run()
    assert len(heard.emissions) == 1
    assert heard.token_ids == expected_tokens([1, 2, 3], 10)


@pytest.mark.invariant("AR-INV-109")
@pytest.mark.parametrize("lag", [0, 1])
def test_a_token_leaves_with_its_payload(lag: int) -> None:
    """Late payloads come back in any number at a time."""
    driver = Driver(feeding(), FakeExecutor(lag=lag), hold_late=True)
    heard = driver.add("a", [4, 5], max_tokens=9)
    for turn in range(60):
        driver.step()
        if turn % 5 == 4 or turn < 3:
            driver.deliver_late()
    tokens = expected_tokens([4, 5], 9)
    assert heard.token_ids == tokens
    assert fed(heard) == [5, *tokens[:-1]], "what each token was computed from, once and in order"
    first = heard.emissions[0].data
    assert first is not None
    assert first.fields["prompt_token_ids"] == [4, 5]
    assert first.modality is Modality.TEXT
    assert [one.final for one in heard.emissions[:-1]] == [False] * (len(heard.emissions) - 1)
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-109")
def test_payloads_of_several_tokens_leave_as_one_emission() -> None:
    driver = Driver(feeding())
    heard = driver.add("a", [4, 5], max_tokens=9, credits=1)
    driver.run()
    driver.acknowledge("a")
    driver.run()
    tokens = expected_tokens([4, 5], 9)
    assert [one.data.fields["token_ids"] for one in heard.emissions if one.data] == [
        tokens[:1],
        tokens[1:],
    ]
    assert fed(heard) == [5, *tokens[:-1]]


@pytest.mark.invariant("AR-INV-109")
def test_final_waits_for_the_last_payload_and_beyond_the_end_nothing_leaves() -> None:
    """With lag 1 a row beyond the end has a payload as well; it belongs to nobody."""
    executor = FakeExecutor(lag=1, forced={"a": [7, 8, EOS, 9, 9, 9]})
    driver = Driver(feeding(), executor, hold_late=True)
    heard = driver.add("a", [4, 5], max_tokens=20)
    driver.step()
    driver.step()
    driver.deliver_late()
    for _ in range(10):
        driver.step()
    assert not heard.ended
    assert driver.scheduler.counts() == (1, 0)
    driver.deliver_late()
    assert heard.ended
    assert heard.token_ids == [7, 8, EOS]
    assert fed(heard) == [5, 7, 8]
    assert heard.finish_reason == "stop"
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-109")
def test_a_payload_that_cannot_be_built_fails_its_child_only() -> None:
    driver = Driver(feeding(), hold_late=True)
    lost, served = driver.add("a", max_tokens=5), driver.add("b", max_tokens=5)
    driver.step()
    driver.step()
    driver.deliver_late()
    driver.step()
    driver.executor.late = [
        (who, InternalError("no payload") if who.request_id == "a" else outcome)
        for who, outcome in driver.executor.late
    ]
    driver.hold_late = False
    driver.run()
    assert lost.error is not None
    assert served.finish_reason == "length"
    driver.assert_nothing_held()


def test_a_request_that_wants_only_text_has_no_payload() -> None:
    driver = Driver(feeding(), hold_late=True)
    heard = driver.add("a", max_tokens=3, fields={"output_modalities": ["text"]})
    driver.step()
    driver.step()
    driver.deliver_late()
    for _ in range(6):
        driver.step()
    assert heard.finish_reason == "length"
    assert not driver.executor.late
    assert "prompt_token_ids" not in heard.emissions[0].data.fields  # type: ignore[union-attr]


def test_logprobs_leave_with_their_tokens() -> None:
    driver = Driver()
    asked, quiet = driver.add("a", max_tokens=2, logprobs=2), driver.add("b", max_tokens=2)
    driver.run()
    token = asked.token_ids[0]
    entry = asked.emissions[0].data.fields["logprobs"][0]  # type: ignore[union-attr]
    assert entry["token_id"] == token
    assert entry["token"] == chr(32 + token)
    assert entry["bytes"] == [32 + token]
    assert entry["logprob"] == -0.5
    assert [one["token_id"] for one in entry["top"]] == [token, EOS]
    assert "logprobs" not in quiet.last


def test_tensors_of_one_name_are_joined_in_order() -> None:
    import torch

    joined = join_tensors(
        [
            {"a": np.ones((2, 3)), "once": np.zeros(1)},
            {"a": np.zeros((1, 3)), "t": torch.ones(1, 2)},
            {"t": torch.zeros(2, 2)},
        ]
    )
    assert joined["a"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert joined["t"].tolist() == [[1.0] * 2, [0.0] * 2, [0.0] * 2]
    assert joined["once"].shape == (1,)
