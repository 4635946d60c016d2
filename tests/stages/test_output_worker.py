"""Late outputs: finished beside the commands, delivered in order, lost with their child alone."""

from __future__ import annotations

import dataclasses
import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from omnistage.contracts.errors import InternalError, OmniError, StageLostError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.messages import (
    Aborted,
    Acknowledge,
    Drain,
    Failed,
    InputConsumed,
    Output,
    Ready,
    ReplicaFailed,
    Shutdown,
    Stopped,
)
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.engine.async_omni import AsyncOmni
from omnistage.stages import replica as replica_module
from omnistage.stages.output_worker import CAPACITY, LateOutput, OutputWorker
from tests.engine.test_toy_pipeline import collect, values
from tests.stages import late_runtime, odd_runtime
from tests.stages.workbench import PATIENCE_S, Workbench, ready_bench
from tests.toy.deployment import counting, expected, toy_config, toy_pipeline
from tests.toy.leaks import assert_idle, nothing_left

LATE = "tests.stages.late_runtime:LateRuntime"
SHORT_S = 0.1
LIMITS_S = {"forward": 30.0, "output": SHORT_S}


@pytest.fixture(autouse=True)
def nothing_noted() -> Iterator[None]:
    odd_runtime.gate.clear()
    late_runtime.noted.clear()
    late_runtime.threads.clear()
    with nothing_left():
        yield
        odd_runtime.gate.set()


@pytest.fixture
def error_lines() -> Iterator[list[str]]:
    """What the output worker logs as errors."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("omnistage.stages.output_worker"), Collect(logging.ERROR)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def acknowledge(bench: Workbench, output: Output) -> None:
    bench.replica.deliver(Acknowledge(identity=output.identity, sequence=output.sequence))


def assert_nothing_held(bench: Workbench) -> None:
    """A call to the executor comes after all late outputs."""
    assert bench.call("executor_holds").result == 0
    assert bench.held() == {}


# in a replica ---------------------------------------------------------------------------------


@pytest.mark.invariant("STAGE-INV-211")
def test_late_outputs_come_in_the_order_given_from_one_thread() -> None:
    with ready_bench(runtime=LATE) as bench:
        bench.submit("first", counting(1, late="gated"))
        bench.submit("then", counting(3, late="now"))
        bench.submit("last", counting(1, late="now"))
        for _ in range(3):
            bench.until(InputConsumed)
        odd_runtime.gate.set()
        outputs = [bench.until(Output) for _ in range(5)]
        seen = [(output.identity.request_id, output.sequence) for output in outputs]
        assert seen[0] == ("first", 0)
        assert [sequence for name, sequence in seen if name == "then"] == [0, 1, 2]
        assert [output.final for output in outputs if output.sequence == 2] == [True]
        assert len(late_runtime.threads) == 1
        assert bench.replica._thread.name not in late_runtime.threads
        for output in outputs:
            acknowledge(bench, output)
        assert_nothing_held(bench)


@pytest.mark.invariant("STAGE-INV-211")
def test_a_command_runs_while_an_output_is_being_finished() -> None:
    """And an idle replica wakes when it is done."""
    with ready_bench(runtime=LATE) as bench:
        slow = bench.submit("slow", counting(1, late="gated"))
        quick = bench.submit("quick", counting(2))
        assert [bench.until(Output).identity for _ in range(2)] == [quick, quick]
        assert bench.held()["late_outputs"] == 1
        odd_runtime.gate.set()
        assert bench.until(Output).identity == slow
        assert "late_outputs" not in bench.held()


@pytest.mark.invariant("STAGE-INV-206")
@pytest.mark.parametrize(
    ("late", "kind"), [("crash", "internal_error"), ("memory", "out_of_memory")]
)
def test_an_error_in_the_work_fails_its_child_alone(late: str, kind: str) -> None:
    with ready_bench(runtime=LATE) as bench:
        bench.submit("bad", counting(1, late=late))
        good = bench.submit("good", counting(1, late="now"))
        failed, output = bench.until(Failed), bench.until(Output)
        assert failed.identity.request_id == "bad"
        assert failed.error.type == kind
        assert "secret" not in failed.error.message
        assert output.identity == good
        acknowledge(bench, output)
        assert_nothing_held(bench)


def test_work_that_finds_the_device_gone_ends_the_replica() -> None:
    with ready_bench(runtime=LATE) as bench:
        bench.submit("r", counting(1, late="lost"))
        assert bench.until(ReplicaFailed).error.type == "stage_lost"
        bench.until(Stopped)


@pytest.mark.invariant("STAGE-INV-212")
def test_outputs_of_aborted_children_are_dropped() -> None:
    with ready_bench(runtime=LATE) as bench:
        running = bench.submit("running", counting(1, late="gated"))
        waiting = bench.submit("waiting", counting(1, late="now"))
        bench.submit("marker")
        assert bench.until(Output).identity.request_id == "marker"
        assert bench.held()["late_outputs"] == 2
        for child in (running, waiting):
            bench.abort(child)
            assert bench.until(Aborted).identity == child
        assert bench.held()["late_outputs"] == 1  # What runs cannot be interrupted.
        again = bench.submit("running", counting(1, late="now", start=7))
        odd_runtime.gate.set()
        output = bench.until(Output)
        assert output.identity == again
        acknowledge(bench, output)
        bench.replica.deliver(
            Acknowledge(identity=RequestIdentity(request_id="marker"), sequence=0)
        )
        assert_nothing_held(bench)
        assert late_runtime.noted == ["finished", "finished"]


@pytest.mark.invariant("STAGE-INV-212")
def test_a_child_of_a_failed_command_is_answered_once() -> None:
    """Its command is tried again in smaller batches, which give the same work again."""
    with ready_bench(runtime=LATE, max_num_seqs=2) as bench:
        gate = bench.submit("gate", counting(1, fault="gated"))
        bench.until(InputConsumed)
        children = [bench.submit(name, counting(1, late="retried")) for name in "ab"]
        odd_runtime.gate.set()
        outputs = [bench.until(Output) for _ in range(3)]
        assert [output.identity for output in outputs] == [gate, *children]
        for output in outputs:
            acknowledge(bench, output)
        assert_nothing_held(bench)


@pytest.mark.invariant("STAGE-INV-209")
def test_a_drain_waits_for_late_outputs() -> None:
    with ready_bench(runtime=LATE) as bench:
        child = bench.submit("r", counting(1, late="gated"))
        bench.until(InputConsumed)
        bench.replica.deliver(Drain())
        odd_runtime.gate.set()
        output = bench.until(Output)
        assert output.identity == child
        acknowledge(bench, output)
        bench.until(Stopped)


@pytest.mark.invariant("STAGE-INV-213")
def test_the_executor_is_closed_after_what_runs_is_finished() -> None:
    with ready_bench(runtime=LATE) as bench:
        bench.submit("running", counting(1, late="gated"))
        bench.submit("waiting", counting(1, late="now"))
        bench.submit("marker")
        bench.until(Output)
        bench.replica.deliver(Shutdown())
        with pytest.raises(queue.Empty):
            bench._mail.get(timeout=SHORT_S)
        odd_runtime.gate.set()
        bench.until(Stopped)
        assert late_runtime.noted == ["finished", "closed"]


@pytest.mark.invariant("STAGE-INV-213")
def test_a_call_to_the_executor_comes_after_late_outputs(monkeypatch) -> None:
    monkeypatch.setattr(replica_module, "DRAIN_LIMIT_S", SHORT_S)
    with ready_bench(runtime=LATE) as bench:
        bench.submit("r", counting(1, late="gated"))
        bench.submit("marker")
        bench.until(Output)
        refused = bench.call("executor_holds")
        assert refused.error is not None
        assert refused.error.type == "unavailable"
        assert bench.held()["late_outputs"] == 1
        odd_runtime.gate.set()
        bench.until(Output)
        assert bench.call("executor_holds").error is None


# stalls ---------------------------------------------------------------------------------------


@pytest.mark.invariant("STAGE-INV-214")
@pytest.mark.parametrize("meanwhile", ["idle", "busy", "full"])
def test_a_stalled_output_thread_says_where_it_is_and_ends_the_replica(
    meanwhile: str, error_lines: list[str]
) -> None:
    """Whatever the executing thread does: it sleeps, runs a command, waits for a place."""
    with ready_bench(runtime=LATE, operation_limits_s=LIMITS_S) as bench:
        bench.submit("stuck", counting(1, late="gated"))
        if meanwhile == "busy":
            bench.submit("command", counting(1, fault="gated"))
        for i in range(CAPACITY + 2 if meanwhile == "full" else 0):
            bench.submit(f"waiting-{i}", counting(1, late="now"))
        failed = bench.until(ReplicaFailed)
        assert failed.error.type == "stage_lost"
        assert "'output'" in failed.error.message
        odd_runtime.gate.set()
        bench.until(Stopped)
        report = "\n".join(error_lines)
        assert "stuck: given" in report
        assert "running for" in report
        assert "in wait_at_gate" in report
        assert ("waiting-0: given" in report) == (meanwhile == "full")


def late_pipeline() -> Any:
    pipeline = toy_pipeline()
    stages = tuple(dataclasses.replace(stage, runtime=LATE) for stage in pipeline.stages)
    return dataclasses.replace(pipeline, stages=stages)


@pytest.mark.invariant("STAGE-INV-211")
async def test_late_outputs_travel_through_a_pipeline() -> None:
    """Of two ranks the leader's is asked, and delivers its half."""
    config = toy_config(ranks=2, pipeline=late_pipeline())
    async with AsyncOmni(config=config) as engine:
        events = await collect(engine, counting(40, late="now", size=8))
        assert values(events) == expected(40)
        await assert_idle(engine)


@pytest.mark.invariant("STAGE-INV-214")
async def test_a_stalled_replica_is_replaced() -> None:
    config = toy_config(ranks=1, pipeline=late_pipeline(), operation_limits_s={"output": 1.0})
    async with AsyncOmni(config=config) as engine:
        with pytest.raises(StageLostError, match="'output'"):
            await collect(engine, counting(1, late="hang"))
        assert values(await collect(engine, counting(2, late="now"))) == expected(2)
        await assert_idle(engine)


# the worker alone -----------------------------------------------------------------------------


class Payload(np.ndarray):
    """An array whose end can be seen."""


@pytest.fixture
def make_worker() -> Iterator[Callable[..., OutputWorker]]:
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


def test_a_worker_that_is_never_used_starts_no_thread(make_worker) -> None:
    before = threading.active_count()
    with ready_bench(runtime=LATE) as bench:
        bench.submit("r")
        bench.until(Output)
        assert not bench.replica._outputs._thread.is_alive()
        assert threading.active_count() == before + 1
    bench = Workbench(runtime=LATE, options={"load_error": "exit"})
    bench.replica.start()
    assert not isinstance(bench.next(), Ready)
    bench.stop()
