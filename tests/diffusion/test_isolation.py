"""A request's result does not depend on what joins, leaves, fails or is cancelled beside it."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnistage.contracts.errors import InternalError, InvalidRequestError, OmniError
from omnistage.diffusion.step_wave import unchanged_on_failure
from tests.diffusion.crowd import Crowd, max_difference, replaced
from tests.diffusion.driver import diffusion_request

TOLERANCE = 1e-5
STEP_MODE = {
    "step_execution": True,
    "diffusion_streaming_output": True,
    "max_num_seqs": 3,
}
REFUSED, BROKEN, NAN = "refused", "broken", "nan"
PROMPTS = ("a red cat", "a", "two very long dogs in front of a big old house by the sea")


@dataclass(frozen=True)
class Ask:
    """One request of a schedule."""

    prompt: str
    guided: bool
    num_steps: int
    width: int
    seed: int
    num_outputs: int = 1
    partial_images: int = 0
    fault: str | None = None
    output_type: str = "latent"

    def request(self, name: str):
        return diffusion_request(
            self.prompt,
            negative_prompt="bad" if self.guided else None,
            true_cfg_scale=3.0 if self.guided else 1.0,
            request_id=name,
            height=32,
            width=self.width,
            num_inference_steps=self.num_steps,
            num_outputs_per_prompt=self.num_outputs,
            partial_images=self.partial_images,
            seed=self.seed,
            output_type=self.output_type,
            extra_args={"max_sequence_length": 5000} if self.fault == REFUSED else {},
        )


ASKS = st.builds(
    Ask,
    prompt=st.sampled_from(PROMPTS),
    guided=st.booleans(),
    num_steps=st.integers(2, 4),
    width=st.sampled_from((32, 48)),
    seed=st.integers(0, 1),
    num_outputs=st.integers(1, 2),
    output_type=st.sampled_from(("latent", "np")),
    partial_images=st.integers(0, 1),
    fault=st.sampled_from((None, None, None, REFUSED, BROKEN, NAN)),
)
TIMES = st.integers(0, 8)


@pytest.fixture(scope="module")
def crowd():
    return Crowd("qwen_image", **STEP_MODE)


@pytest.fixture(scope="module")
def alone(crowd):
    """`alone(ask)`: the result of that request with nobody beside it."""
    return functools.cache(lambda ask: crowd.alone(ask.request("alone")))


class Faults:
    """Strike the first or second step of each request that has one."""

    def __init__(self, crowd: Crowd, asks: dict[str, Ask]) -> None:
        self._crowd = crowd
        self._asks = asks

    def step_scheduler(self, original):
        def step(state, prediction):
            ask = self._asks[state.identity.request_id]
            if ask.fault == BROKEN and state.step_index == 1:
                raise KeyError(f"injected into {state.identity.request_id}")
            if ask.fault == NAN and state.step_index == 0:
                state.latents = state.latents * float("nan")
            return original(state, prediction)

        return step


def run(crowd: Crowd, asks: dict[str, Ask], **times):
    requests = {name: ask.request(name) for name, ask in asks.items()}
    faults = Faults(crowd, asks)
    with replaced(crowd.family, "step_scheduler", faults.step_scheduler):
        outcome = crowd.run(requests, **times)
    assert crowd.steps.num_states == 0
    return outcome


def check(outcome, asks: dict[str, Ask], gone: set[str], alone) -> None:
    """Survivors have their own results, those with a fault their own errors."""
    for name, ask in asks.items():
        if name in gone and name not in outcome.results | outcome.errors:
            continue
        if ask.fault is None:
            assert name not in outcome.errors, outcome.errors[name].detail
            assert max_difference(outcome.results[name], alone(ask)) <= TOLERANCE, name
        else:
            check_error(ask, name, outcome.errors[name])


def check_error(ask: Ask, name: str, error: OmniError) -> None:
    if ask.fault == REFUSED:
        assert type(error) is InvalidRequestError
        assert "max_sequence_length" in error.message
    elif ask.fault == BROKEN:
        assert type(error) is InternalError
        assert f"injected into {name}" in error.detail
    else:
        assert type(error) is InternalError
        assert "NaN" in error.message


@pytest.mark.invariant("DIFF-RUNTIME-INV-048")
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(data=st.data(), asks=st.lists(ASKS, min_size=2, max_size=5))
def test_a_result_does_not_depend_on_what_happens_beside_it(data, asks, crowd, alone):
    named = {f"r{i}": ask for i, ask in enumerate(asks)}
    names = st.sampled_from(sorted(named))
    joins = data.draw(st.dictionaries(names, TIMES))
    aborts = data.draw(st.dictionaries(names, TIMES, max_size=2))
    cancels = data.draw(st.dictionaries(names, TIMES, max_size=1))
    cancels = {name: at for name, at in cancels.items() if name not in aborts}
    outcome = run(crowd, named, joins_at=joins, aborts_at=aborts, cancels_at=cancels)
    check(outcome, named, aborts.keys() | cancels.keys(), alone)


ASK = Ask(prompt=PROMPTS[0], guided=True, num_steps=3, width=32, seed=0)
MIXED = {
    "a": ASK,
    "b": Ask(prompt=PROMPTS[2], guided=False, num_steps=2, width=32, seed=1, num_outputs=2),
    "c": Ask(prompt=PROMPTS[1], guided=True, num_steps=4, width=32, seed=1),
}


def test_the_reference_is_no_trifle(crowd, alone):
    """Different requests differ by far more than the tolerance, and are loud."""
    images = [torch.as_tensor(alone(ask).tensors["images"])[:1] for ask in MIXED.values()]
    for i, one in enumerate(images):
        assert one.abs().max() > 0.1
        assert all((one - other).abs().max() > 100 * TOLERANCE for other in images[i + 1 :])


class TestItCanFail:
    """Each of these mistakes is found by `check`."""

    @pytest.fixture(autouse=True)
    def _known(self, alone) -> None:
        """What is right is known before anything is broken."""
        for ask in MIXED.values():
            alone(ask)

    def found(self, crowd, alone) -> None:
        joins = {"b": 2, "c": 3}
        outcome = run(crowd, MIXED, joins_at=joins)
        with pytest.raises(AssertionError):
            check(outcome, MIXED, set(), alone)

    def test_static_inputs_kept_under_the_number_of_rows_only(self, crowd, alone):
        kept = {}

        def make(original):
            return lambda parts: kept.setdefault(len(parts), original(parts))

        with replaced(crowd.family, "_static", make):
            self.found(crowd, alone)

    def test_predictions_of_two_requests_swapped(self, crowd, alone):
        with replaced(
            crowd.family,
            "denoise_step",
            lambda original: lambda states: original(states)[::-1],
        ):
            self.found(crowd, alone)

    def test_a_step_taken_twice_after_a_failure(self, crowd, alone):
        def make(original):
            failures = iter([True])

            def step(state, prediction):
                original(state, prediction)
                if state.step_index == 1 and next(failures, False):
                    state.step_index = 0
                    raise KeyError("halfway")

            return step

        with replaced(crowd.family, "step_scheduler", make):
            self.found(crowd, alone)


@pytest.mark.invariant("DIFF-RUNTIME-INV-048")
@pytest.mark.parametrize("partial_images", [0, 1])
def test_nan_in_one_request_reaches_nobody_else(partial_images, crowd, alone):
    """NaN from the first step on, through further waves and a batched preview or the end."""
    base = {"guided": True, "num_steps": 4, "width": 32, "partial_images": partial_images}
    asks = {
        "a": Ask(prompt=PROMPTS[0], seed=0, **base),
        "sick": Ask(prompt=PROMPTS[2], seed=1, fault=NAN, **base),
        "c": Ask(prompt=PROMPTS[1], seed=1, **base),
    }
    outcome = run(crowd, asks)
    check(outcome, asks, set(), alone)
    assert set(outcome.results) == {"a", "c"}
    shown = {name: len(pictures) for name, pictures in outcome.previews.items()}
    assert shown == ({"a": 1, "c": 1} if partial_images else {})


@pytest.mark.invariant("DIFF-RUNTIME-INV-048")
def test_the_same_schedule_gives_the_same_bits(crowd):
    joins = {"b": 2, "c": 3}
    first, second = (run(crowd, MIXED, joins_at=joins) for _ in range(2))
    assert first.commands == second.commands
    for name in MIXED:
        one, other = (outcome.results[name].tensors["images"] for outcome in (first, second))
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.invariant("DIFF-RUNTIME-INV-045")
@pytest.mark.parametrize("error", [KeyError("once"), torch.OutOfMemoryError("once")])
@pytest.mark.parametrize("name", MIXED)
def test_a_failure_halfway_moves_nobody_twice(name, error, crowd, alone):
    """The step of one of three fails once; those before it have moved already."""
    failures = iter([error])
    taken = defaultdict(int)

    def make(original):
        def step(state, prediction):
            request_id = state.identity.request_id
            if request_id == name and state.step_index == 1 and (failure := next(failures, None)):
                raise failure
            taken[request_id] += 1
            return original(state, prediction)

        return step

    requests = {one: ask.request(one) for one, ask in MIXED.items()}
    with replaced(crowd.family, "step_scheduler", make):
        outcome = crowd.run(requests)
    assert taken == {one: ask.num_steps for one, ask in MIXED.items()}
    check(outcome, MIXED, set(), alone)


@pytest.mark.invariant("DIFF-RUNTIME-INV-045")
def test_a_multistep_scheduler_that_failed_inside_its_step_can_repeat_it():
    """UniPC shifts its history before it computes."""
    from diffusers import UniPCMultistepScheduler

    def fail_after(step, *args) -> None:
        with unchanged_on_failure(step.__self__):
            step(*args)
            raise KeyError("it has changed already")

    def run(fails_at: int | None) -> torch.Tensor:
        scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
        scheduler.set_timesteps(5)
        latents = torch.linspace(-1, 1, 16).view(1, 4, 2, 2)
        for number, timestep in enumerate(scheduler.timesteps):
            if number == fails_at:
                with pytest.raises(KeyError):
                    fail_after(scheduler.step, latents * 0.5, timestep, latents)
            (latents,) = scheduler.step(latents * 0.5, timestep, latents, return_dict=False)
        return latents

    for number in range(5):
        assert torch.equal(run(number), run(None))


def test_a_prompt_that_only_its_encoding_refuses_is_its_own_fault(crowd, alone):
    def make(original):
        def encode(prompts):
            if any(one["text"] == "unspeakable" for one in prompts):
                crowd.family.pipeline.check_inputs(7, 32, 32)
            return original(prompts)

        return encode

    bad = diffusion_request("unspeakable", request_id="bad", height=32, width=32, seed=0)
    with replaced(crowd.family, "encode", make):
        outcome = crowd.run({"bad": bad, "a": ASK.request("a")})
    assert type(outcome.errors["bad"]) is InvalidRequestError
    assert "`prompt` has to be of type" in outcome.errors["bad"].message
    assert max_difference(outcome.results["a"], alone(ASK)) <= TOLERANCE


def test_latents_of_a_wrong_shape_are_their_senders_fault(crowd, alone):
    """The first step finds it out, as in request mode."""
    latents = np.zeros((1, 5, 16), np.float32)
    bad = diffusion_request("a", request_id="bad", height=32, width=32, latents=latents, seed=0)
    outcome = crowd.run({"bad": bad, "a": ASK.request("a")})
    assert type(outcome.errors["bad"]) is InvalidRequestError
    assert outcome.errors["bad"].param == "latents"
    assert max_difference(outcome.results["a"], alone(ASK)) <= TOLERANCE
