"""Request mode decides what runs next, and owns every request until it ends."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OutOfMemoryError,
    OverloadedError,
    RequestCancelledError,
    StageLostError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Emission, StageRequest
from omnistage.contracts.sampling import OmniTokenSamplingParams
from omnistage.diffusion.batching import call_key, pack, unpack
from omnistage.diffusion.queue import WaitingQueue
from omnistage.diffusion.request_scheduler import RequestScheduler
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


# batches --------------------------------------------------------------------------------------


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def batching(max_num_seqs: int = 3, max_wait_s: float = 0.0, clock: Clock | None = None):
    clock = clock or Clock()
    queue = WaitingQueue(capacity=1000, defaults={}, batch_key=call_key, clock=clock)
    return RequestScheduler(queue, max_num_seqs=max_num_seqs, max_wait_s=max_wait_s, clock=clock)


def members(command) -> list[str]:
    return [identity.request_id for identity in command.identities]


def served(scheduler) -> list[list[str]]:
    batches = []
    while (command := scheduler.next_command()) is not None:
        batches.append(members(command))
        finish(scheduler, command)
    return batches


@pytest.mark.invariant("DIFF-RUNTIME-INV-052")
def test_the_head_is_served_first_with_all_that_share_its_call():
    scheduler = batching()
    for name, height in (("a", 32), ("b", 64), ("c", 32), ("d", 64), ("e", 32), ("f", 32)):
        scheduler.add(request(name, height=height))
    scheduler.add(request("urgent", height=64, priority=1))
    assert served(scheduler) == [["urgent", "b", "d"], ["a", "c", "e"], ["f"]]


@pytest.mark.invariant("DIFF-RUNTIME-INV-052")
class TestWaiting:
    def test_it_says_exactly_how_long(self):
        clock = Clock()
        scheduler = batching(3, 0.25, clock)
        assert scheduler.next_wake_s() is None
        scheduler.add(request("a"))
        assert scheduler.next_command() is None
        assert scheduler.next_wake_s() == pytest.approx(0.25)
        clock.now_s += 0.1
        scheduler.add(request("b"))
        assert scheduler.next_command() is None
        assert scheduler.next_wake_s() == pytest.approx(0.15), "since the first came"
        clock.now_s += scheduler.next_wake_s()
        command = scheduler.next_command()
        assert members(command) == ["a", "b"]
        assert scheduler.next_wake_s() is None, "mail ends what runs"

    def test_a_full_batch_does_not_wait(self):
        scheduler = batching(2, 10.0)
        for name in "ab":
            scheduler.add(request(name))
        assert members(scheduler.next_command()) == ["a", "b"]

    def test_nor_does_one_that_nobody_can_join(self):
        scheduler = batching(2, 10.0)
        scheduler.add(request("a", latents=np.zeros((1, 2, 3), np.float32)))
        assert members(scheduler.next_command()) == ["a"]

    def test_nor_does_what_is_tried_again(self):
        scheduler = batching(2, 10.0)
        for name in "ab":
            scheduler.add(request(name))
        assert tuple(scheduler.fail(scheduler.next_command(), InternalError("x"))) == ()
        assert served(scheduler) == [["a"], ["b"]]

    def test_a_batch_that_memory_has_bounded_is_full_at_its_bound(self):
        scheduler = batching(4, 10.0)
        for name in "abcdef":
            scheduler.add(request(name))
        scheduler.fail(scheduler.next_command(), OutOfMemoryError("x"))
        assert served(scheduler) == [["a", "b"], ["c", "d"], ["e", "f"]]


@pytest.mark.invariant("DIFF-RUNTIME-INV-045")
def test_a_failed_batch_is_tried_again_in_halves_in_order():
    scheduler = batching(4)
    for name in "abcd":
        scheduler.add(request(name))
    tried, errors = [], []
    while (command := scheduler.next_command()) is not None:
        tried.append("".join(members(command)))
        if "b" in tried[-1]:
            errors += scheduler.fail(command, InternalError("b's"))
        else:
            finish(scheduler, command)
    assert tried == ["abcd", "ab", "a", "b", "cd"]
    assert [emission.identity.request_id for emission in errors] == ["b"]


class Schedules(RuleBasedStateMachine):
    """Joins, aborts, failures and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.scheduler = batching(3, 0.5, self.clock)
        self.keys: dict[str, object] = {}
        self.open: set[str] = set()
        self.aborted: set[str] = set()
        self.ended: list[str] = []
        self.command = None

    @rule(height=st.sampled_from((16, 32)), guided=st.booleans(), priority=st.integers(0, 1))
    def join(self, height, guided, priority) -> None:
        name = f"r{len(self.keys)}"
        self.keys[name] = (height, guided)
        self.open.add(name)
        negative = "bad" if guided else None
        one = request(name, height=height, negative_prompt=negative, priority=priority)
        self.scheduler.add(one)

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds) -> None:
        self.clock.now_s += seconds

    @precondition(lambda self: self.command is None)
    @rule()
    def begin(self) -> None:
        self.command = self.scheduler.next_command()
        if self.command is None:
            return
        names = members(self.command)
        assert len({self.keys[name] for name in names}) == 1
        assert 1 <= len(names) <= 3

    @precondition(lambda self: self.command is not None)
    @rule(error=st.none() | st.sampled_from([InternalError, OutOfMemoryError, StageLostError]))
    def end(self, error) -> None:
        command, self.command = self.command, None
        if error is None:
            emissions = finish(self.scheduler, command)
        else:
            emissions = self.scheduler.fail(command, error("injected"))
        for emission in emissions:
            assert emission.final
            self.ended.append(emission.identity.request_id)
            self.open.remove(self.ended[-1])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(name)
        self.aborted.add(name)
        self.scheduler.abort((name, 0))

    @invariant()
    def nobody_is_lost(self) -> None:
        assert sum(self.scheduler.counts()) == len(self.open)

    @invariant()
    def a_wait_has_an_end(self) -> None:
        if self.command is None and self.open:
            wake_s = self.scheduler.next_wake_s()
            assert wake_s is None or 0 <= wake_s <= 0.5

    def teardown(self) -> None:
        if self.command is not None:
            self.end(None)
        self.clock.now_s += 0.5
        while self.open:
            self.begin()
            assert self.command is not None, "it waits for nothing"
            self.end(None)
        assert self.scheduler.counts() == (0, 0)
        assert sorted(self.ended) == sorted(self.keys.keys() - self.aborted)


Schedules.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.invariant("DIFF-RUNTIME-INV-001")
class TestSchedules(Schedules.TestCase):
    """Every request that is not aborted ends exactly once, and nothing is left."""
