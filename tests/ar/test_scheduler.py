"""The token scheduler drives a fake executor: what is generated, however it is batched."""

from __future__ import annotations

import pytest

from tests.ar.driver import Driver, token_options
from tests.ar.fake_executor import FakeExecutor, expected_tokens


@pytest.mark.parametrize("lag", [0, 1])
def test_one_request_generates_what_its_model_says(lag: int) -> None:
    driver = Driver(executor=FakeExecutor(lag=lag))
    heard = driver.add("a", [5, 6, 7], max_tokens=9)
    driver.run()
    assert heard.token_ids == expected_tokens([5, 6, 7], 9)
    assert heard.finish_reason == "length"
    assert heard.text == "".join(chr(32 + one) for one in heard.token_ids)
    assert heard.last["prompt_tokens"] == 3
    assert heard.last["completion_tokens"] == 9
    timings_s = heard.emissions[-1].timings_s
    assert list(timings_s) == ["queue", "prefill", "decode"]
    assert all(seconds >= 0 for seconds in timings_s.values())
    driver.assert_nothing_held()


@pytest.mark.invariant("AR-INV-101")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_blocks", [64, 14])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_batching_changes_nothing(lag: int, num_blocks: int, chunked: bool, caching: bool) -> None:
    """With 14 blocks requests preempt each other; their tokens are the same."""
    driver = Driver(
        token_options(
            max_num_batched_tokens=24,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
        ),
        FakeExecutor(lag=lag, num_blocks=num_blocks),
    )
    prompts = [[7, 8, 9, 10, 11, 12, 13, 14][: 2 + n % 7] * (1 + n % 3) for n in range(12)]
    heard = [driver.add(f"r{n}", prompt, max_tokens=17) for n, prompt in enumerate(prompts)]
    driver.run()
    for one, prompt in zip(heard, prompts, strict=True):
        assert one.token_ids == expected_tokens(prompt, 17)
    preemptions = driver.scheduler.stats()["preemptions"]
    assert preemptions > 0 if num_blocks == 14 else preemptions == 0
    driver.assert_nothing_held()
