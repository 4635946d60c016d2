"""Late outputs in a replica: beside the commands, in order, lost with their child alone."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from typing import Any

import pytest

from omnistage.contracts.errors import StageLostError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.messages import (
    Aborted,
    Acknowledge,
    Drain,
    Failed,
    InputConsumed,
    Output,
    ReplicaFailed,
    Shutdown,
    Stopped,
)
from omnistage.engine.async_omni import AsyncOmni
from omnistage.stages import replica as replica_module
from omnistage.stages.output_worker import CAPACITY
from tests.engine.test_toy_pipeline import collect, values
from tests.stages import late_runtime, odd_runtime
from tests.stages.workbench import Workbench, ready_bench
from tests.toy.deployment import counting, expected, toy_config, toy_pipeline
from tests.toy.leaks import assert_idle

LATE = "tests.stages.late_runtime:LateRuntime"
SHORT_S = 0.1
LIMITS_S = {"forward": 30.0, "output": SHORT_S}


@pytest.fixture(autouse=True)
def nothing_noted(leak_free_gate: None) -> None:
    late_runtime.noted.clear()
    late_runtime.threads.clear()


def acknowledge(bench: Workbench, output: Output) -> None:
    bench.replica.deliver(Acknowledge(identity=output.identity, sequence=output.sequence))


def assert_nothing_held(bench: Workbench) -> None:
    """A call to the executor comes after all late outputs."""
    assert bench.call("executor_holds").result == 0
    assert bench.held() == {}


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


@pytest.mark.invariant("STAGE-INV-215")
def test_an_input_that_takes_long_delays_neither_outputs_nor_calls() -> None:
    with ready_bench(runtime=LATE) as bench:
        bench.submit("slow", counting(1, late="gated", lane="input"))
        bench.until(InputConsumed)
        bench.submit("quick", counting(2, late="now"))
        outputs = [bench.until(Output) for _ in range(2)]
        assert [output.identity.request_id for output in outputs] == ["quick", "quick"]
        assert bench.call("executor_holds").error is None
        assert bench.held()["late_outputs"] == 1
        odd_runtime.gate.set()
        outputs.append(bench.until(Output))
        assert outputs[-1].identity.request_id == "slow"
        assert len(late_runtime.threads) == 2
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
        assert odd_runtime.at_gate.wait(20), "the gated work has not begun"
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


@pytest.mark.invariant("STAGE-INV-209")
def test_a_drain_waits_for_work_whose_child_is_gone(monkeypatch) -> None:
    """Longer than an end does; and an idle replica wakes although there is no outcome."""
    monkeypatch.setattr(replica_module, "DRAIN_LIMIT_S", SHORT_S)
    with ready_bench(runtime=LATE) as bench:
        running = bench.submit("running", counting(1, late="gated"))
        bench.until(InputConsumed)
        assert bench.held()["late_outputs"] == 1
        assert odd_runtime.at_gate.wait(20)  # Work that has not begun goes with its child.
        bench.abort(running)
        bench.until(Aborted)
        bench.replica.deliver(Drain())
        with pytest.raises(queue.Empty):
            bench._mail.get(timeout=3 * SHORT_S)
        odd_runtime.gate.set()
        bench.until(Stopped)
        assert late_runtime.noted == ["finished", "closed"]


@pytest.mark.invariant("STAGE-INV-200")
def test_a_shutdown_ends_the_wait_for_a_place_in_the_queue(monkeypatch) -> None:
    monkeypatch.setattr(replica_module, "DRAIN_LIMIT_S", SHORT_S)
    with ready_bench(runtime=LATE) as bench:
        for i in range(CAPACITY + 2):
            bench.submit(f"{i}", counting(1, late="gated"))
        for _ in range(CAPACITY + 2):
            bench.until(InputConsumed)
        time.sleep(SHORT_S)  # One runs, the rest but one fit: the last one's command waits.
        bench.replica.deliver(Shutdown())
        bench.until(Stopped)
        assert late_runtime.noted == ["closed"]


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


def test_a_replica_without_late_outputs_has_one_thread() -> None:
    before = threading.active_count()
    with ready_bench(runtime=LATE) as bench:
        bench.submit("r")
        bench.until(Output)
        assert threading.active_count() == before + 1
