"""Request mode with several requests a call: who shares, who waits, what a failure costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnistage.contracts.errors import InternalError, OutOfMemoryError, StageLostError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Emission, StageRequest
from omnistage.diffusion.batching import call_key, pack
from omnistage.diffusion.queue import WaitingQueue
from omnistage.diffusion.request_scheduler import RequestScheduler
from tests.diffusion.driver import diffusion_request


def request(name: str, **changes) -> StageRequest:
    return diffusion_request(request_id=name, **changes)


def finish(scheduler, command) -> tuple[Emission, ...]:
    result = StageData(modality=Modality.IMAGE)
    return tuple(scheduler.complete(command, [pack([result] * len(command.identities))]))


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
