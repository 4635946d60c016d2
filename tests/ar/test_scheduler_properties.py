"""Whatever arrives, is aborted, is not read or lacks memory: the same tokens, nothing left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ar.driver import Driver, token_options
from tests.ar.fake_executor import FakeExecutor, expected_tokens

requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=20),
        "max_tokens": st.integers(1, 20),
        "priority": st.integers(0, 2),
        "credits": st.integers(1, 3),
        "delta": st.booleans(),
    }
)
stages = st.fixed_dictionaries(
    {
        "lag": st.integers(0, 1),
        "num_blocks": st.integers(11, 30),
        "chunked": st.booleans(),
        "caching": st.booleans(),
        "budget": st.integers(20, 40),
        "payloads": st.booleans(),
    }
)


def make_driver(stage: dict[str, Any]) -> Driver:
    options = token_options(
        max_num_seqs=4,
        max_num_batched_tokens=stage["budget"],
        enable_chunked_prefill=stage["chunked"],
        enable_prefix_caching=stage["caching"],
        feeds_stages=stage["payloads"],
        emits_payload=stage["payloads"],
    )
    executor = FakeExecutor(lag=stage["lag"], num_blocks=stage["num_blocks"], max_num_seqs=4)
    return Driver(options, executor)


@pytest.mark.invariant("AR-INV-101")
@settings(max_examples=120, deadline=None)
@given(stages, st.lists(requests, max_size=9), st.data())
def test_any_mix_of_requests(
    stage: dict[str, Any], mix: list[dict[str, Any]], data: st.DataObject
) -> None:
    driver = make_driver(stage)
    heard = {}
    aborted = set()
    for number, one in enumerate(mix):
        heard[f"r{number}"] = driver.add(f"r{number}", **one)
        for _ in range(data.draw(st.integers(0, 4))):
            driver.step()
        name = data.draw(st.sampled_from([None, None, *heard]))
        if name is not None and name not in aborted and not heard[name].ended:
            driver.abort(name)
            aborted.add(name)
    for _ in range(400):
        driver.run()
        waiting = [n for n, one in heard.items() if n not in aborted and not one.ended]
        if not waiting:
            break
        driver.acknowledge(waiting[0])
    for number, one in enumerate(mix):
        name = f"r{number}"
        if name not in aborted:
            assert heard[name].token_ids == expected_tokens(one["prompt"], one["max_tokens"])
            assert heard[name].finish_reason == "length"
    driver.assert_nothing_held()
    budget = stage["budget"]
    assert all(plan.num_tokens <= budget for plan in driver.executor.plans)
