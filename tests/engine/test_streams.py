"""The stream between the orchestrator and one caller."""

from __future__ import annotations

import asyncio

import pytest

from omnistage.contracts.errors import RequestCancelledError
from omnistage.contracts.outputs import PARTIAL_IMAGE_INDEX, OmniProgress, OmniRequestOutput
from omnistage.engine.streams import OutputStream


class Bench:
    def __init__(self, window: int = 2, buffer: int = 100) -> None:
        self.full: list[bool] = []
        self.taken: list[int] = []
        self.stream = OutputStream({0: window, 1: window}, buffer, self.full.append)

    def put(self, number: int, stage: int = 1, child: int = 0) -> None:
        event = OmniRequestOutput(
            request_id="r", stage_id=stage, child_index=child, output_index=number, partial=True
        )
        self.stream.put(event, lambda: self.taken.append(number))

    def preview(self, index: int, child: int = 0) -> None:
        self.stream.put(
            OmniRequestOutput(
                request_id="r",
                stage_id=1,
                child_index=child,
                partial=True,
                fields={PARTIAL_IMAGE_INDEX: index},
            )
        )

    def progress(self, step: int, child: int = 0) -> None:
        progress = OmniProgress(stage_id=1, step=step, total_steps=9)
        self.stream.put(
            OmniRequestOutput(
                request_id="r", stage_id=1, child_index=child, partial=True, progress=progress
            )
        )


@pytest.mark.invariant("ORCH-INV-101")
async def test_events_come_in_order_and_are_paid_when_taken() -> None:
    bench = Bench(window=9)
    for number in range(3):
        bench.put(number)
    assert bench.taken == []
    assert [(await bench.stream.get()).output_index for _ in range(3)] == [0, 1, 2]
    assert bench.taken == [0, 1, 2]


@pytest.mark.invariant("ORCH-INV-106")
async def test_full_is_when_one_child_has_no_credit_left() -> None:
    """Other children may have ended long ago: they do not raise the bound."""
    bench = Bench(window=2)
    bench.put(0, child=1)
    bench.put(1, child=2)
    assert bench.full == []
    bench.put(2, child=2)
    assert bench.full == [True]
    bench.put(3, child=1)
    await bench.stream.get()
    assert bench.full == [True]
    await bench.stream.get()
    assert bench.full == [True, False]


@pytest.mark.invariant("ORCH-INV-106")
async def test_full_is_also_when_the_buffer_is() -> None:
    bench = Bench(window=10, buffer=3)
    for child in range(3):
        bench.put(child, child=child)
    assert bench.full == [True]


@pytest.mark.invariant("ORCH-INV-106")
async def test_only_the_newest_progress_of_each_child_waits() -> None:
    bench = Bench()
    for step in range(1000):
        bench.progress(step, child=step % 3)
    bench.put(7)
    assert len(bench.stream) == 4
    steps = [(await bench.stream.get()).progress.step for _ in range(3)]
    assert steps == [997, 998, 999]
    bench.progress(5)
    assert (await bench.stream.get()).output_index == 7
    assert (await bench.stream.get()).progress.step == 5


@pytest.mark.invariant("ORCH-INV-107")
async def test_only_the_newest_previews_of_each_child_wait() -> None:
    """As many as one request may ask for, so that none is lost to a reader of its own."""
    bench = Bench(window=1, buffer=1)
    bench.preview(0, child=1)
    for index in range(5):
        bench.preview(index)
        bench.progress(index)
    assert bench.full == []
    events = [await bench.stream.get() for _ in range(len(bench.stream))]
    previews = [(e.child_index, e.fields[PARTIAL_IMAGE_INDEX]) for e in events if e.is_preview]
    assert previews == [(1, 0), (0, 2), (0, 3), (0, 4)]
    assert len(events) == 5


async def test_a_failure_drops_what_is_unread_and_wakes_the_reader() -> None:
    bench = Bench()
    bench.put(0)
    error = RequestCancelledError("over")
    bench.stream.fail(error)
    for _ in range(2):
        with pytest.raises(RequestCancelledError):
            await bench.stream.get()
    assert bench.taken == []
    with pytest.raises(AssertionError):
        bench.stream.fail(error)
    waiting = Bench()
    reader = asyncio.create_task(waiting.stream.get())
    await asyncio.sleep(0)
    waiting.stream.fail(error)
    with pytest.raises(RequestCancelledError):
        await asyncio.wait_for(reader, 10)


async def test_nothing_comes_after_the_terminal_event() -> None:
    bench = Bench()
    bench.stream.put(OmniRequestOutput(request_id="r", finished=True))
    assert bench.stream.finished
    with pytest.raises(AssertionError):
        bench.put(0)
