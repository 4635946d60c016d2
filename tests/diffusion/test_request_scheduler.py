"""Request mode decides what runs next, and owns every request until it ends."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Emission, StageRequest
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.diffusion.batching import pack, unpack
from omnistage.diffusion.runtime import DiffusionRuntime
from tests.diffusion.driver import diffusion_request, diffusion_stage


def make_scheduler(**changes):
    return DiffusionRuntime.scheduler(diffusion_stage("/nowhere", **changes))


def request(name: str, **changes) -> StageRequest:
    return diffusion_request(request_id=name, **changes)


def finish(scheduler, command) -> tuple[Emission, ...]:
    result = StageData(modality=Modality.IMAGE, fields={"timings_s": {"exec": 1.0}})
    return tuple(scheduler.complete(command, [pack([result] * len(command.identities))]))


def drain(scheduler) -> list[str]:
    names = []
    while (command := scheduler.next_command()) is not None:
        (identity,) = command.identities
        names.append(identity.request_id)
        finish(scheduler, command)
    return names


def test_order_is_priority_then_arrival():
    scheduler = make_scheduler()
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("c", 0), ("later", -1)):
        scheduler.add(request(name, priority=priority))
    assert drain(scheduler) == ["urgent", "a", "b", "c", "later"]


@pytest.mark.invariant("DIFF-RUNTIME-INV-001")
def test_a_request_ends_exactly_once():
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    with pytest.raises(InternalError, match="already"):
        scheduler.add(request("a"))
    command = scheduler.next_command()
    with pytest.raises(InternalError, match="already"):
        scheduler.add(request("a"))
    assert scheduler.next_command() is None, "one at a time"
    assert scheduler.counts() == (1, 0)
    (emission,) = finish(scheduler, command)
    assert emission.final
    assert emission.timings_s == {"exec": 1.0}
    assert finish(scheduler, command) == ()
    assert tuple(scheduler.fail(command, InternalError("late"))) == ()
    assert scheduler.counts() == (0, 0)


@pytest.mark.invariant("DIFF-RUNTIME-INV-003")
@pytest.mark.parametrize("running", [False, True])
def test_abort_forgets_a_request_wherever_it_is(running):
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    command = scheduler.next_command() if running else None
    scheduler.abort(("a", 0))
    scheduler.abort(("a", 0))
    scheduler.abort(("unknown", 3))
    assert scheduler.counts() == (0, 0)
    if command is not None:
        assert finish(scheduler, command) == ()
    assert scheduler.next_command() is None
    scheduler.add(request("a"))
    assert drain(scheduler) == ["a"]


def test_a_failure_ends_the_request_with_its_error():
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    error = RequestCancelledError("enough")
    (emission,) = scheduler.fail(scheduler.next_command(), error)
    assert emission.error is error
    assert emission.data is None
    assert emission.final
    assert scheduler.counts() == (0, 0)


@pytest.mark.invariant("DIFF-RUNTIME-INV-018")
def test_a_full_queue_refuses_at_once():
    scheduler = make_scheduler(options={"max_queued_requests": 2})
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(OverloadedError) as caught:
        scheduler.add(request("c"))
    assert caught.value.retry_after_s
    assert scheduler.counts() == (0, 2)
    scheduler.next_command()
    scheduler.add(request("c"))


def test_parameters_of_another_kind_of_stage_are_refused():
    scheduler = make_scheduler()
    wrong = StageRequest(
        identity=RequestIdentity(request_id="a"),
        data=StageData(modality=Modality.TEXT),
        params=OmniTokenSamplingParams(),
    )
    with pytest.raises(InvalidRequestError, match="OmniTokenSamplingParams"):
        scheduler.add(wrong)
    with pytest.raises(InvalidRequestError, match="extra_args"):
        scheduler.add(request("b", extra_args={"f": object()}))
    assert scheduler.counts() == (0, 0)


@pytest.mark.invariant("DIFF-RUNTIME-INV-002")
def test_a_command_carries_all_that_a_rank_needs_as_plain_values():
    latents = np.ones((1, 2, 3), np.float32)
    scheduler = make_scheduler(default_sampling_params={"num_inference_steps": 9, "height": 64})
    scheduler.add(request("a", height=32, latents=latents, extra_args={"clip_skip": 1}))
    command = scheduler.next_command()
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(command.data.fields))
    assert plain == command.data.fields
    (payload,) = unpack(command.data)
    params = payload.fields["params"]
    assert (params["height"], params["num_inference_steps"]) == (32, 9)
    assert isinstance(params["seed"], int), "drawn once, so that all ranks have the same"
    assert payload.tensors["latents"] is latents


class TestStreamedInput:
    def piece(self, prompt: str, **fields) -> StageData:
        return StageData(modality=Modality.TEXT, fields={"prompt": prompt, **fields})

    @pytest.fixture
    def open_request(self):
        scheduler = make_scheduler()
        scheduler.add(request("a", prompt="a red ", input_complete=False))
        return scheduler, RequestIdentity(request_id="a")

    def test_it_waits_for_the_end_and_joins_the_pieces(self, open_request):
        scheduler, identity = open_request
        assert scheduler.next_command() is None
        scheduler.append_input(identity, self.piece("cat", negative_prompt="bad"), 0)
        assert scheduler.next_command() is None
        scheduler.end_input(identity, 0)
        (payload,) = unpack(scheduler.next_command().data)
        fields = payload.fields
        assert (fields["prompt"], fields["negative_prompt"]) == ("a red cat", "bad")

    def test_a_later_epoch_replaces_what_came_before(self, open_request):
        scheduler, identity = open_request
        scheduler.append_input(identity, self.piece("a blue "), 1)
        scheduler.append_input(identity, self.piece("old"), 0)
        scheduler.end_input(identity, 0)
        assert scheduler.next_command() is None
        scheduler.append_input(identity, self.piece("dog"), 1)
        scheduler.end_input(identity, 1)
        (payload,) = unpack(scheduler.next_command().data)
        assert payload.fields["prompt"] == "a blue dog"

    def test_others_pass_a_request_that_waits_for_input(self, open_request):
        scheduler, _ = open_request
        scheduler.add(request("b"))
        assert drain(scheduler) == ["b"]
        assert scheduler.counts() == (0, 1)

    def test_input_of_an_unknown_request_is_ignored(self, open_request):
        scheduler, _ = open_request
        stranger = RequestIdentity(request_id="x")
        scheduler.append_input(stranger, self.piece("x"), 0)
        scheduler.end_input(stranger, 0)
        assert scheduler.counts() == (0, 1)


def test_a_request_without_credits_waits_for_them():
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    scheduler.set_credits(("a", 0), 0)
    assert scheduler.next_command() is None
    scheduler.set_credits(("a", 0), 1)
    assert scheduler.next_command() is not None


def test_batching_of_requests_is_refused_at_start():
    with pytest.raises(UnsupportedCombinationError, match="supports_request_batch"):
        make_scheduler(max_num_seqs=2)
