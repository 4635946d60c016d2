"""A replica's leader: what one child does to it must not reach another, nor end it in silence."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import (
    Aborted,
    Acknowledge,
    Drain,
    Failed,
    FromReplica,
    Heartbeat,
    InputConsumed,
    LoadProgress,
    Output,
    Ready,
    ReplicaFailed,
    Shutdown,
    StartFailed,
    Stopped,
)
from omnistage.transport.codec import MessageDecoder, encode
from tests.stages import odd_runtime
from tests.stages.workbench import Workbench, ready_bench
from tests.toy.deployment import counting
from tests.toy.leaks import nothing_left


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    odd_runtime.gate.clear()
    odd_runtime.at_gate.clear()
    yield
    odd_runtime.gate.set()


@pytest.mark.invariant("STAGE-INV-206")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_output_that_cannot_travel_fails_its_child_alone(ranks: int) -> None:
    with nothing_left(), ready_bench(ranks=ranks) as bench:
        bench.submit("bad", counting(2, fault="unsendable"))
        failed = bench.until(Failed)
        assert failed.identity.request_id == "bad"
        assert failed.error.type == "invalid_request_error"
        good = bench.submit("good")
        output = bench.until(Output)
        assert output.identity == good
        assert output.final
        bench.replica.deliver(Acknowledge(identity=good, sequence=0))
        bench.abort(failed.identity)
        bench.until(Aborted)
        assert bench.held() == {}


@pytest.mark.invariant("STAGE-INV-102")
def test_a_load_that_exits_is_a_failed_start_even_if_it_cannot_close() -> None:
    bench = Workbench(options={"load_error": "exit"})
    bench.replica.start()
    failed = bench.next()
    assert isinstance(failed, StartFailed)
    assert "exit" in (failed.error.detail or "")
    bench.stop()


@pytest.mark.invariant("STAGE-INV-102")
def test_an_executor_that_exits_says_so_and_stops() -> None:
    with ready_bench() as bench:
        bench.submit("bad", counting(1, fault="exit"))
        bench.until(ReplicaFailed)
        assert isinstance(bench.next(), Stopped)


def test_a_shutdown_ends_a_load_at_its_next_report() -> None:
    bench = Workbench(options={"load_error": "gated"})
    bench.replica.start()
    bench.until(LoadProgress)
    odd_runtime.gate.set()
    bench.stop()
    failed = bench.until(StartFailed)
    assert "stopped" in failed.error.message


def test_a_call_whose_answer_cannot_travel_is_answered_by_an_error() -> None:
    with ready_bench() as bench:
        answer = bench.call("unsendable")
        assert answer.error is not None
        assert answer.error.type == "invalid_request_error"
        unknown = bench.call("nonsense")
        assert unknown.error is not None
        assert bench.held() == {}


@pytest.mark.invariant("STAGE-INV-206")
def test_input_that_was_overtaken_by_an_abort_is_ignored() -> None:
    """The abort stops the running command; what came before it meets no scheduler any more."""
    with ready_bench() as bench:
        child = bench.submit("r", counting(1, fault="gated"), input_complete=False)
        bench.until(InputConsumed)
        bench.append(child)
        bench.end(child)
        bench.abort(child)
        odd_runtime.gate.set()
        bench.until(Aborted)
        assert bench.held() == {}
        bench.submit("next")
        assert bench.until(Output).identity.request_id == "next"


@pytest.mark.invariant("STAGE-INV-207")
def test_input_for_a_child_that_has_ended_is_given_back() -> None:
    """Nobody else would free its payload or return its credit."""
    with ready_bench() as bench:
        child = bench.submit("r")
        assert bench.until(Output).final
        bench.append(child, sequence=1)
        assert bench.until(InputConsumed).sequence == 1
        bench.end(child)
        assert bench.held() == {"children": 1}  # Its output waits for its acknowledgement.


@pytest.mark.invariant("STAGE-INV-209")
def test_drain_finishes_what_is_held_and_takes_nothing_new() -> None:
    with nothing_left():
        bench = Workbench()
        bench.replica.start()
        bench.until(Ready)
        child = bench.submit("old", counting(1, fault="gated"))
        bench.until(InputConsumed)
        bench.replica.deliver(Drain())
        bench.submit("new")
        odd_runtime.gate.set()
        output, failed = bench.until(Output), bench.until(Failed)
        assert output.identity == child
        assert output.final
        assert failed.error.type == "unavailable"
        assert failed.identity.request_id == "new"
        bench.replica.deliver(Acknowledge(identity=child, sequence=0))
        bench.until(Stopped)
        bench.replica._thread.join(10)
        assert not bench.replica._thread.is_alive()


@pytest.mark.invariant("STAGE-INV-203")
def test_an_input_adapter_is_under_the_clock_too() -> None:
    adapters = {0: "tests.stages.odd_runtime:gated_adapter"}
    with ready_bench(stage_id=1, input_adapters=adapters) as bench:
        bench.submit("r", source_stage_id=0)
        bench.until(InputConsumed)
        assert bench.replica.status().operation is not None
        odd_runtime.gate.set()
        bench.until(Output)


def test_a_child_pauses_without_credits_and_goes_on_with_them() -> None:
    with ready_bench() as bench:
        child = bench.submit("r", counting(5), credits=2)
        assert [bench.until(Output).sequence for _ in range(2)] == [0, 1]
        assert bench.held()["scheduled"] == 1
        for sequence in range(3):
            bench.replica.deliver(Acknowledge(identity=child, sequence=sequence))
            bench.replica.deliver(Acknowledge(identity=child, sequence=sequence))
            assert bench.until(Output).sequence == sequence + 2


def test_a_scheduler_hears_of_first_credits_when_it_has_the_child(monkeypatch) -> None:
    heard: list[int] = []
    set_credits = odd_runtime.OddScheduler.set_credits

    def note(self: odd_runtime.OddScheduler, key: RequestKey, credits: int) -> None:
        if key in self._children:
            heard.append(credits)
        set_credits(self, key, credits)

    monkeypatch.setattr(odd_runtime.OddScheduler, "set_credits", note)
    with ready_bench() as bench:
        bench.submit("r", counting(1), credits=2)
        bench.until(Output)
    assert heard[0] == 2


@pytest.mark.invariant("STAGE-INV-300")
def test_a_profile_is_recorded_on_demand(tmp_path) -> None:
    with ready_bench() as bench:
        assert bench.call("stop_profile").error is not None
        assert bench.call("start_profile", directory=str(tmp_path)).error is None
        assert bench.call("start_profile", directory=str(tmp_path)).error is not None
        bench.submit("r")
        bench.until(Output)
        (path,) = bench.call("stop_profile").result
        assert os.path.dirname(path) == str(tmp_path)
        assert bench.call("start_profile", directory=str(tmp_path), max_steps=1).error is None
        bench.submit("s")
        bench.until(Output)
        assert len(bench.call("stop_profile").result) == 1
        assert bench.call("start_profile", where="?").error is not None


@pytest.mark.invariant("STAGE-INV-202")
def test_a_rank_that_dies_while_idle_is_reported() -> None:
    bench = Workbench(ranks=2)
    bench.replica.start()
    ready = bench.until(Ready)
    os.kill(ready.rank_pids[0], signal.SIGKILL)
    assert bench.lost_ranks.get(timeout=20) == 1
    bench.submit("r")
    assert bench.until(ReplicaFailed).error.type == "stage_lost"
    bench.stop()


@pytest.mark.invariant("STAGE-INV-200")
def test_a_shutdown_that_is_read_before_it_is_waited_for_ends_at_once() -> None:
    """The replica reads its mail at two places; after its end it neither works nor sleeps."""
    bench = Workbench()
    bench.replica.start()
    bench.until(Ready)
    bench.submit("r", counting(1, fault="gated"))
    bench.until(InputConsumed)
    bench.replica.deliver(Shutdown())
    odd_runtime.gate.set()
    bench.until(Stopped)
    bench.replica._thread.join(10)
    assert not bench.replica._thread.is_alive()


@pytest.mark.invariant("ORCH-INV-001")
def test_a_stage_speaks_for_itself_and_to_the_engine_only() -> None:
    """Whatever address its code writes on a message, its own replica's goes out."""
    bench = Workbench(stage_id=1)
    bench.replica.post(Aborted(identity=RequestIdentity(request_id="r"), stage_id=0, replica_id=7))
    message = bench.next()
    assert (message.stage_id, message.replica_id) == (1, 0)


def test_what_a_scheduler_counts_goes_out_with_the_replicas_status() -> None:
    with ready_bench() as bench:
        bench.held()  # Its executing thread has been through the loop once.
        assert bench.replica.status().stats == {"preemptions": 3}
        sent = Heartbeat(statuses=(bench.replica.status(),))
        heartbeat, _ = MessageDecoder(FromReplica).decode(encode(sent))
        assert isinstance(heartbeat, Heartbeat)
        assert heartbeat.statuses[0].stats == {"preemptions": 3}
