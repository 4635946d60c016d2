"""Turns on a shared device."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.diffusion.active import ActiveRequest, Phase
from omnistage.diffusion.queue import QueuedRequest
from omnistage.diffusion.streamed_input import InputBuffer
from omnistage.diffusion.turns import PATIENCE, turn


@dataclass
class Device:
    """Takes the steps of each wave; its time is the work it has done."""

    work_done: int = 0
    here: list[ActiveRequest] = field(default_factory=list)
    waves: list[list[str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def admit(self, name: str, cost: int, steps: int, priority: int = 0) -> ActiveRequest:
        entry = QueuedRequest(
            identity=RequestIdentity(request_id=name, priority=priority),
            inputs=InputBuffer(data=StageData(modality=Modality.TEXT), complete=True),
            params=OmniDiffusionSamplingParams(),
            arrival=len(self.here) + len(self.ended),
            arrived_s=0.0,
        )
        one = ActiveRequest(entry, work_before=self.work_done)
        one.begin(batch_key=cost, cost=cost, total_steps=steps)
        self.here.append(one)
        return one

    def step(self) -> list[ActiveRequest]:
        wave = turn(self.here)
        self.waves.append([one.key[0] for one in wave])
        for one in wave:
            self.work_done += one.cost
            one.moved_to(one.step + 1)
            if one.phase is Phase.DECODE:
                self.here.remove(one)
                self.ended.append(one.key[0])
        return wave

    def finish(self) -> None:
        while self.here:
            self.step()


CROWD = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from((1, 2, 5, 9)), st.integers(1, 8)), min_size=2
)
"""Waves that pass before each comes, its cost (one shape each), its steps."""


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
@settings(deadline=None)
@given(crowd=CROWD)
def test_no_wave_leaves_one_out_for_another_that_came_after_it_was_due(crowd):
    device = Device()
    for number, (pause, cost, steps) in enumerate(crowd):
        for _ in range(pause):
            if device.here:
                before = list(device.here)
                check(before, device.step())
        device.admit(f"r{number}", cost, steps)
    while device.here:
        before = list(device.here)
        check(before, device.step())


def check(before: list[ActiveRequest], wave: list[ActiveRequest]) -> None:
    assert wave
    assert len({one.batch_key for one in wave}) == 1
    for out in before:
        if out not in wave:
            due = out.work_before + PATIENCE * out.work
            assert all(one.work_before <= due for one in wave)


@pytest.mark.invariant("DIFF-RUNTIME-INV-043")
@settings(deadline=None)
@given(
    large=st.tuples(st.integers(5, 9), st.integers(5, 20)),
    small=st.tuples(st.integers(1, 4), st.integers(1, 20)),
    beside=st.integers(1, 4),
)
def test_a_large_one_waits_for_endless_small_ones_half_its_own_work(large, small, beside):
    """And for what those that are here when it is due have left."""
    device = Device()
    target = device.admit("target", *large)
    others = 0
    for number in range(500):
        while len(device.here) <= beside and target in device.here:
            device.admit(f"small{number}-{len(device.here)}", *small)
        if target not in device.here:
            break
        wave = device.step()
        others += sum(one.cost for one in wave if one is not target)
    small_work = small[0] * small[1]
    assert target not in device.here
    assert others <= PATIENCE * target.work + beside * (small[0] + small_work)


@settings(deadline=None)
@given(order=st.permutations([(1, 12), (2, 6), (3, 4), (4, 3)]), pauses=st.integers(0, 2))
def test_of_equal_work_the_first_to_come_ends_first(order, pauses):
    device = Device()
    for cost, steps in order:
        device.admit(str(cost), cost, steps)
        for _ in range(pauses):
            device.step()
    device.finish()
    assert device.ended == [str(cost) for cost, _ in order]


@settings(deadline=None)
@given(crowd=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), min_size=1))
def test_alone_a_shape_steps_whole(crowd):
    device = Device()
    for number, (pause, steps) in enumerate(crowd):
        device.admit(f"r{number}", 1, steps)
        for _ in range(pause):
            present = list(device.here)
            assume(present)
            assert sorted(one.key for one in device.step()) == sorted(one.key for one in present)


def test_of_those_that_come_together_the_small_one_goes_first():
    device = Device()
    device.admit("large", 4, 3)
    device.admit("small", 1, 3)
    device.finish()
    assert device.ended == ["small", "large"]


def test_priority_comes_before_all():
    device = Device()
    device.admit("small", 1, 1)
    device.admit("urgent", 9, 9, priority=1)
    device.finish()
    assert device.ended == ["urgent", "small"]


def test_nobody_of_less_priority_joins_a_wave_that_leaves_a_more_urgent_one_out():
    device = Device()
    device.admit("urgent", 1, 2, priority=1)
    device.admit("urgent too", 9, 2, priority=1)
    device.admit("patient", 1, 2)
    device.finish()
    assert device.ended == ["urgent", "urgent too", "patient"]
