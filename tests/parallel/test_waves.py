"""Ranks that each serve a request of their own, in one wave."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from omnistage.contracts.payloads import StageData
from omnistage.contracts.tensors import host_tensor
from omnistage.parallel.groups import open_process_groups
from omnistage.parallel.topology import Topology
from tests.checkpoints import checkpoint
from tests.diffusion.driver import Driver, diffusion_request, diffusion_stage
from tests.parallel.bench import serving

SIZE = {"height": 32, "width": 32, "output_type": "np"}
FAMILY = "flux"


def two_ranks(**changes):
    parallel = changes.pop("parallel", ParallelConfig(data_parallel_size=2))
    changes.setdefault("request_batch_max_wait_ms", 1000.0)  # A full wave waits for nothing.
    return diffusion_stage(checkpoint(FAMILY), parallel=parallel, devices=("cpu",) * 2, **changes)


@pytest.fixture(scope="module")
def alone():
    driver = Driver(checkpoint(FAMILY))
    return lambda prompt, **params: pixels(driver.run(diffusion_request(prompt, **params)))


@pytest.fixture(scope="module")
def bench():
    with serving(two_ranks()) as bench:
        yield bench


def pixels(answer):
    return host_tensor(answer.tensors["images"]).numpy()


@pytest.mark.invariant("PARALLEL-INV-005")
def test_two_requests_of_one_wave_equal_one_process(bench, alone):
    asked = {
        "a": ("a red cat", {"seed": 1, "num_inference_steps": 2}),
        "b": ("a blue dog", {"seed": 2, "num_inference_steps": 3}),
    }
    bench.waves.clear()
    for name, (prompt, params) in asked.items():
        bench.submit(name, prompt, **params, **SIZE)
    answers = bench.answers(2)
    assert bench.waves == [["a", "b"]]
    for name, (prompt, params) in asked.items():
        expected = alone(prompt, **params, **SIZE)
        assert np.abs(expected).max() > 0.05
        np.testing.assert_array_equal(pixels(answers[name]), expected)


@pytest.mark.invariant("PARALLEL-INV-005")
def test_requests_of_different_calls_share_a_wave(bench, alone):
    bench.waves.clear()
    small = {"seed": 3, "num_inference_steps": 2, **SIZE}
    large = {**small, "height": 64}
    bench.submit("small", **small)
    bench.submit("large", **large)
    answers = bench.answers(2)
    assert bench.waves == [["small", "large"]]
    np.testing.assert_array_equal(pixels(answers["small"]), alone("a red cat", **small))
    np.testing.assert_array_equal(pixels(answers["large"]), alone("a red cat", **large))


@pytest.mark.invariant("PARALLEL-INV-005")
@pytest.mark.parametrize("first", [True, False])
def test_a_fault_in_one_share_is_not_the_others(bench, alone, first):
    sound = {"seed": 4, "num_inference_steps": 2, **SIZE}
    faulty = {**sound, "extra_args": {"max_sequence_length": 4096}}
    bench.waves.clear()
    for name in ("faulty", "sound") if first else ("sound", "faulty"):
        bench.submit(name, **(faulty if name == "faulty" else sound))
    answers = bench.answers(2)
    assert len(bench.waves) == 1
    assert isinstance(answers["faulty"], InvalidRequestError)
    np.testing.assert_array_equal(pixels(answers["sound"]), alone("a red cat", **sound))


@pytest.mark.invariant("PARALLEL-INV-005")
@pytest.mark.parametrize("first", [True, False])
def test_a_share_that_goes_on_hears_of_its_cancellation(bench, first):
    """Also when the leader's own share has ended: the wave ends with the slowest."""
    quick = {"seed": 5, "num_inference_steps": 2, **SIZE}
    endless = {**quick, "num_inference_steps": 5000}
    bench.progress.clear()
    names = ("endless", "quick") if first else ("quick", "endless")
    asked = {
        name: bench.submit(name, **(endless if name == "endless" else quick)) for name in names
    }
    bench.until_step(names[0], 2)
    bench.abort(asked["endless"])
    answers = bench.answers(2)
    assert answers["endless"] is None
    assert isinstance(answers["quick"], StageData)


@pytest.mark.invariant("PARALLEL-INV-005")
def test_a_single_request_leaves_the_other_rank_idle(bench, alone):
    params = {"seed": 6, "num_inference_steps": 2, **SIZE}
    bench.waves.clear()
    for name in ("a", "b", "c"):
        bench.submit(name, **params)
    answers = bench.answers(3)
    assert bench.waves == [["a", "b"], ["c"]]
    for answer in answers.values():
        np.testing.assert_array_equal(pixels(answer), alone("a red cat", **params))


@pytest.mark.invariant("PARALLEL-INV-004")
def test_a_second_stage_of_several_ranks_in_the_process_is_refused(bench):
    topology = Topology.of(ParallelConfig(data_parallel_size=2))
    with pytest.raises(UnsupportedCombinationError, match="cannot share one process"):
        open_process_groups(topology, 0, device="cpu", rendezvous=None, timeout_s=1.0)


@pytest.mark.invariant("PARALLEL-INV-001")
def test_groups_know_their_members(bench):
    groups = bench.replica._executor._groups
    assert (groups.size("data"), groups.rank_in("data"), groups.members("data")) == (2, 0, [0, 1])
    assert groups.size("sequence") == 1
    assert groups.group_of("data").size() == groups.group_of("world").size() == 2
    assert groups.control_group_of("data") is not groups.group_of("data")
    with pytest.raises(InternalError, match="no group 'sequence'"):
        groups.group_of("sequence")
