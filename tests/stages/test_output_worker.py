"""The output worker by itself: a bounded queue, memory let go, a limit for each work."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from omnistage.contracts.errors import InternalError, OmniError, StageLostError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.stages.output_worker import LateOutput, OutputWorker
from tests.stages import odd_runtime
from tests.stages.workbench import PATIENCE_S

SHORT_S = 0.1


class Payload(np.ndarray):
    """An array whose end can be seen."""


@pytest.fixture
def make_worker(leak_free_gate: None) -> Iterator[Callable[..., OutputWorker]]:
    workers: list[OutputWorker] = []

    def make(outcomes: Any, **changes: Any) -> OutputWorker:
        settings = {"limit_s": PATIENCE_S, "on_stall": lambda error: None} | changes
        worker = OutputWorker("toy", 0, 0, on_outcome=outcomes.put, **settings)
        workers.append(worker)
        return worker

    yield make
    odd_runtime.gate.set()
    for worker in workers:
        worker.close(PATIENCE_S)
        worker.close(PATIENCE_S)


def child(name: str) -> RequestIdentity:
    return RequestIdentity(request_id=name)


def gated() -> StageData:
    odd_runtime.wait_at_gate()
    return StageData(modality=Modality.HIDDEN)


@pytest.mark.invariant("STAGE-INV-212")
@pytest.mark.parametrize("when", ["waiting", "running", "done"])
def test_withdrawn_work_lets_go_of_its_memory(when: str, make_worker) -> None:
    outcomes: queue.SimpleQueue[LateOutput] = queue.SimpleQueue()
    worker = make_worker(outcomes)
    begun = threading.Event()

    def give() -> weakref.ref:
        payload = np.zeros(8).view(Payload)

        def work() -> StageData:
            begun.set()
            if when == "running":
                odd_runtime.wait_at_gate()
            return StageData(modality=Modality.HIDDEN, tensors={"x": payload})

        worker.submit(child("r"), work)
        return weakref.ref(payload)

    if when == "waiting":
        worker.submit(child("before"), gated)
    gc.disable()  # Nothing may wait for the collector.
    try:
        left = give()
        if when != "waiting":
            assert begun.wait(PATIENCE_S)
        late = outcomes.get(timeout=PATIENCE_S) if when == "done" else None
        worker.withdraw(child("r").key)
        odd_runtime.gate.set()
        assert worker.drain(PATIENCE_S)
        if late is not None:
            assert worker.take(late) is None
        worker.close(PATIENCE_S)
        assert left() is None
    finally:
        gc.enable()
    assert worker.num_pending == (1 if when == "waiting" else 0)  # "before" is not delivered.


def test_an_error_keeps_nothing_of_what_it_was_about(make_worker) -> None:
    outcomes: queue.SimpleQueue[LateOutput] = queue.SimpleQueue()
    worker = make_worker(outcomes)

    def give() -> weakref.ref:
        payload = np.zeros(8).view(Payload)

        def work() -> StageData:
            try:
                raise ValueError(payload.shape)
            except ValueError as error:
                raise InternalError("broken") from error

        worker.submit(child("r"), work)
        return weakref.ref(payload)

    gc.disable()
    try:
        left = give()
        outcome = worker.take(outcomes.get(timeout=PATIENCE_S))
        assert worker.drain(PATIENCE_S)
        worker.close(PATIENCE_S)
        assert isinstance(outcome, OmniError)
        assert "ValueError" in (outcome.detail or "")
        assert left() is None
    finally:
        gc.enable()


def test_a_full_queue_holds_back_who_fills_it(make_worker) -> None:
    worker = make_worker(queue.SimpleQueue(), capacity=1)
    worker.submit(child("running"), gated)
    filler = threading.Thread(
        target=lambda: [worker.submit(child(f"{i}"), gated) for i in range(2)], daemon=True
    )
    filler.start()
    filler.join(SHORT_S)
    assert filler.is_alive()
    assert worker.num_pending <= 2
    odd_runtime.gate.set()
    filler.join(PATIENCE_S)
    assert not filler.is_alive()
    assert worker.drain(PATIENCE_S)
    assert worker.num_pending == 3


@pytest.mark.invariant("STAGE-INV-200")
def test_a_shutdown_ends_the_wait_for_a_place(make_worker) -> None:
    worker = make_worker(queue.SimpleQueue(), capacity=1)
    lates: list[LateOutput] = []
    filler = threading.Thread(
        target=lambda: lates.extend(worker.submit(child(f"{i}"), gated) for i in range(3)),
        daemon=True,
    )
    filler.start()
    filler.join(SHORT_S)
    assert filler.is_alive()
    worker.end_waits()
    filler.join(PATIENCE_S)
    assert not filler.is_alive()
    assert lates[-1].withdrawn


def test_a_drain_gives_up_and_says_what_is_stuck(make_worker, error_lines: list[str]) -> None:
    worker = make_worker(queue.SimpleQueue())
    worker.submit(child("stuck"), gated)
    assert not worker.drain(SHORT_S)
    assert "stuck: given" in error_lines[0]
    odd_runtime.gate.set()
    assert worker.drain(PATIENCE_S)


@pytest.mark.invariant("STAGE-INV-214")
def test_each_work_has_the_limit_for_itself(make_worker) -> None:
    """Many works that take longer than the limit together are no stall."""
    stalls: list[StageLostError] = []
    outcomes: queue.SimpleQueue[LateOutput] = queue.SimpleQueue()
    worker = make_worker(outcomes, limit_s=1.0, on_stall=stalls.append)
    pause = threading.Event()

    def work() -> StageData:
        pause.wait(0.04)
        return StageData(modality=Modality.HIDDEN)

    for i in range(30):
        worker.submit(child(str(i)), work)
    assert worker.drain(PATIENCE_S)
    assert [outcomes.get().identity.request_id for _ in range(30)] == [str(i) for i in range(30)]
    assert stalls == []
