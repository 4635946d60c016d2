"""Waves whose ranks gather their weights at every step: all take the same steps, or none."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.contracts.errors import (
    OmniError,
    UnsupportedCombinationError,
)
from omnistage.contracts.tensors import host_tensor
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver, diffusion_request
from tests.parallel.bench import serving
from tests.parallel.gathering import gathering_stage

SIZE = {"height": 32, "width": 32, "output_type": "np"}


@pytest.fixture(scope="module")
def alone():
    driver = Driver(checkpoint("flux"))
    return lambda prompt, **params: pixels(driver.run(diffusion_request(prompt, **params)))


@pytest.fixture(scope="module")
def bench():
    with serving(gathering_stage()) as bench:
        yield bench


def pixels(answer):
    return host_tensor(answer.tensors["images"]).numpy()


@pytest.mark.invariant("PARALLEL-INV-003")
def test_requests_of_equal_steps_share_a_wave_and_others_do_not(bench, alone):
    bench.waves.clear()
    steps = {"a": 2, "b": 3, "c": 2}
    for seed, (name, count) in enumerate(steps.items()):
        bench.submit(name, seed=seed, num_inference_steps=count, **SIZE)
    answers = bench.answers(3)
    assert bench.waves == [["a", "c"], ["b"]]  # The rank beside b runs b too.
    for seed, (name, count) in enumerate(steps.items()):
        expected = alone("a red cat", seed=seed, num_inference_steps=count, **SIZE)
        np.testing.assert_array_equal(pixels(answers[name]), expected)


@pytest.mark.invariant("PARALLEL-INV-003")
def test_a_request_must_state_its_steps(bench):
    bench.submit("open", num_inference_steps=None, **SIZE)
    answer = bench.answers(1)["open"]
    assert isinstance(answer, UnsupportedCombinationError)
    assert "num_inference_steps is not given" in answer.message
    assert answer.status == 400


@pytest.mark.invariant("PARALLEL-INV-003")
def test_one_cancelled_leaves_the_other_in_step(bench, alone):
    params = {"seed": 5, "num_inference_steps": 12, **SIZE}
    bench.progress.clear()
    leaving = bench.submit("leaving", **params)
    bench.submit("staying", **params)
    bench.until_step("staying", 2)
    bench.abort(leaving)
    answers = bench.answers(2)
    assert answers["leaving"] is None
    np.testing.assert_array_equal(pixels(answers["staying"]), alone("a red cat", **params))


@pytest.mark.invariant("PARALLEL-INV-003")
def test_all_cancelled_stop_together_and_the_next_wave_is_in_step(bench, alone):
    params = {"seed": 6, "num_inference_steps": 200, **SIZE}
    leaving = [bench.submit(name, **params) for name in ("first", "second")]
    bench.until_step("first", 2)
    for one in leaving:
        bench.abort(one)
    assert bench.answers(2) == {"first": None, "second": None}
    assert max(one.step for one in bench.progress if one.identity.request_id == "first") < 200
    params["num_inference_steps"] = 2
    bench.submit("next", **params)
    np.testing.assert_array_equal(pixels(bench.answers(1)["next"]), alone("a red cat", **params))


@pytest.mark.invariant("PARALLEL-INV-003")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_before_a_step_ends_its_own_request_only(bench, alone, rank):
    params = {"seed": 7, "num_inference_steps": 2, **SIZE}
    bench.submit("faulty", f"fail:{rank}", **params)
    bench.submit("sound", **params)
    answers = bench.answers(2)
    assert isinstance(answers["faulty"], OmniError)
    np.testing.assert_array_equal(pixels(answers["sound"]), alone("a red cat", **params))
