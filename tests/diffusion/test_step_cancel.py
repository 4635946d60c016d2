"""A cancel in step mode: no further step, nothing left."""

from __future__ import annotations

import gc
import weakref

import pytest

from omnistage.attention.joint import RealFrequencies
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from tests.diffusion.crowd import Crowd, cancel_many, replaced, tensors_alive
from tests.diffusion.driver import diffusion_request

CANCELS = 1000
STEPS = 5


def request(name: str, seed: int = 0):
    return diffusion_request(
        "a red cat",
        negative_prompt="bad" if seed % 2 else None,
        true_cfg_scale=3.0 if seed % 2 else 1.0,
        request_id=name,
        height=32,
        width=32,
        num_inference_steps=STEPS,
        partial_images=seed % 3,
        seed=seed,
    )


@pytest.fixture(scope="module")
def crowd():
    return Crowd("qwen_image", step_execution=True, diffusion_streaming_output=True, max_num_seqs=8)


@pytest.mark.invariant("DIFF-RUNTIME-INV-051")
@pytest.mark.parametrize("how", ["aborts_at", "cancels_at"])
def test_the_wave_after_a_cancel_is_without_the_request(how, crowd):
    """An abort counts from the next command; a cancel from the command that begins with it."""
    at = 4
    outcome = crowd.run({name: request(name) for name in "ab"}, **{how: {"a": at}})
    taken = [members for _, members in outcome.commands]
    assert "a" in taken[at - 1]
    assert all("a" not in members for members in taken[at + (how == "cancels_at") :])
    assert outcome.results.keys() == {"b"}


@pytest.mark.invariant("DIFF-RUNTIME-INV-051")
@pytest.mark.parametrize("at", range(STEPS + 3))
def test_a_cancel_at_any_point_frees_every_tensor(at, crowd):
    seen = []

    def note(command):
        if command.name != "encode":
            state = crowd.state("a")
            tensors = [state.latents, state.clean, state.timesteps]
            tensors += [one for branch in state.branches for one in branch.values()]
            seen.extend(weakref.ref(one) for one in tensors if one is not None)

    outcome = crowd.run({"a": request("a", 1)}, cancels_at={"a": at}, before=note)
    assert outcome.results == outcome.errors == {}
    assert crowd.steps.num_states == 0
    gc.collect()
    assert [one for one in seen if one() is not None] == []
    assert bool(seen) == (at > 0)


@pytest.mark.invariant("DIFF-RUNTIME-INV-051")
def test_a_thousand_random_cancels_leave_nothing(crowd):
    done = cancel_many(crowd, CANCELS // 10, seed=0)
    before = tensors_alive()
    done += cancel_many(crowd, CANCELS, seed=1)
    assert crowd.steps.num_states == 0
    assert crowd.scheduler.counts() == (0, 0)
    assert crowd.family._batches == {}
    assert tensors_alive() - before <= 2 * RealFrequencies.max_entries, "the bounded cache apart"
    assert done >= CANCELS // 10


@pytest.mark.invariant("DIFF-RUNTIME-INV-040")
@pytest.mark.invariant("DIFF-RUNTIME-INV-051")
def test_cancels_while_outputs_are_being_finished_leave_nothing(crowd):
    """As on a GPU, where each output is finished beside the next command."""
    delivered = []

    def make(original):
        def send(context, identity, *args):
            result = original(context, identity, *args)

            def work():
                delivered.append(identity)
                return result

            context.finish_later(identity, work)
            return StageData(modality=Modality.IMAGE, fields={"late": True})

        return send

    with replaced(crowd.steps._output, "send", make):
        done = cancel_many(crowd, 150, seed=2)
    assert done >= 15
    assert len(delivered) > done
    assert crowd.steps.num_states == 0
    assert crowd.scheduler.counts() == (0, 0)
