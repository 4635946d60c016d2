"""Deaths and hangs on the toy pipeline: who fails, who does not, and what comes back."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from omnistage.config.resolved import RestartPolicy
from omnistage.contracts.errors import InternalError, StageLostError, UnavailableError
from omnistage.engine.async_omni import AsyncOmni
from omnistage.stages.pool import ReplicaState
from tests.engine.test_toy_pipeline import collect, values
from tests.toy.deployment import counting, expected, toy_config
from tests.toy.leaks import assert_idle, assert_no_tasks, nothing_left, wait_until

ROUNDS = 50


@pytest.fixture
async def engine() -> AsyncIterator[AsyncOmni]:
    with nothing_left():
        before = asyncio.all_tasks()
        async with AsyncOmni(config=toy_config(ranks=2)) as engine:
            yield engine
            await wait_until(lambda: engine.health().ready, "the replicas to be back")
            await assert_idle(engine)
        await assert_no_tasks(before)


def process_ids(engine: AsyncOmni, stage_id: int) -> tuple[int, ...]:
    """The leader's process id, then the ranks'."""
    return engine._running().supervisor.pools[stage_id].replicas[0].pids


async def outcome(engine: AsyncOmni, start: int) -> str:
    """Run one request; every end but the right answer or a lost stage is a failure."""
    try:
        events = await collect(engine, counting(8, start=start, delay_s=0.001, size=20_000))
    except StageLostError:
        return "lost"
    assert values(events) == expected(8, start=start)
    return "done"


@pytest.mark.slow
@pytest.mark.invariant("STAGE-INV-201")
@pytest.mark.invariant("STAGE-INV-202")
@pytest.mark.parametrize("who", ["leader", "rank"])
async def test_a_death_fails_only_what_it_held(engine: AsyncOmni, who: str) -> None:
    """50 kills at random points: what runs ends as done or lost, and the next one succeeds."""
    choose = random.Random(who)
    lost = 0
    for round_ in range(ROUNDS):
        stage_id = round_ % 2
        running = asyncio.create_task(outcome(engine, round_))
        if round_ % 10 == 9:
            await running  # A death while nothing runs harms nobody.
        await asyncio.sleep(choose.uniform(0.0, 0.03))
        pids = process_ids(engine, stage_id)
        before = engine._running().supervisor.pools[stage_id].replicas[0]
        os.kill(pids[0] if who == "leader" else pids[1], signal.SIGKILL)
        await wait_until(lambda b=before: b.state is not ReplicaState.READY, "the death be seen")
        following = await asyncio.wait_for(outcome(engine, 1000 + round_), 60)
        assert following == "done"
        lost += await asyncio.wait_for(running, 60) == "lost"
    assert 0 < lost < ROUNDS, "the kills should hit some requests and miss others"


@pytest.mark.invariant("STAGE-INV-203")
async def test_a_hang_is_found_and_healed() -> None:
    """Health says so while it happens; the request fails; the replica comes back."""
    with nothing_left():
        config = toy_config(ranks=2, operation_limits_s={"step": 0.5}, heartbeat_timeout_s=4.0)
        async with AsyncOmni(config=config) as engine:
            hang = counting(3, fault={"kind": "hang", "at": 1, "stage": 1})
            with pytest.raises(StageLostError, match="hung"):
                await collect(engine, hang)
            health = engine.health()
            assert not health.live
            assert "scale" in (health.reason or "")
            assert values(await collect(engine, counting(2))) == expected(2)
            assert engine.health().ready
            await assert_idle(engine)


@pytest.mark.invariant("STAGE-INV-203")
async def test_a_hung_rank_is_a_hung_replica() -> None:
    with nothing_left():
        config = toy_config(ranks=2, operation_limits_s={"step": 0.5}, heartbeat_timeout_s=4.0)
        async with AsyncOmni(config=config) as engine:
            hang = counting(3, fault={"kind": "hang", "at": 0, "stage": 0, "rank": 1})
            with pytest.raises(StageLostError):
                await collect(engine, hang)
            assert values(await collect(engine, counting(2))) == expected(2)


async def test_a_stopped_process_is_silent_and_replaced() -> None:
    """SIGSTOP: no thread of the process runs, so the heartbeat stops."""
    with nothing_left():
        async with AsyncOmni(config=toy_config(ranks=1, heartbeat_timeout_s=0.5)) as engine:
            pid = process_ids(engine, 0)[0]
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(StageLostError, match="no sign of life"):
                await collect(engine, counting(3))
            assert values(await collect(engine, counting(2))) == expected(2)


@pytest.mark.invariant("STAGE-INV-204")
async def test_a_replica_that_dies_too_often_stays_down() -> None:
    with nothing_left():
        policy = RestartPolicy(max_restarts=2, window_s=100, backoff_s=0.01, max_backoff_s=0.01)
        async with AsyncOmni(config=toy_config(ranks=1, restart=policy)) as engine:
            die = counting(1, fault={"kind": "die", "at": 0, "stage": 0})
            for _ in range(3):
                with pytest.raises(StageLostError):
                    await collect(engine, die)
            with pytest.raises(UnavailableError, match="down"):
                await collect(engine, counting(1))
            assert "down" in (engine.health().reason or "")


@pytest.mark.invariant("STAGE-INV-100")
async def test_a_request_keeps_its_replica_and_others_survive_a_death() -> None:
    with nothing_left():
        async with AsyncOmni(config=toy_config(ranks=1, replicas=2)) as engine:
            runs = {i: engine.generate(counting(300, start=i, delay_s=0.001)) for i in range(4)}
            first = {i: await anext(events) for i, events in runs.items()}
            seen: dict[int, set] = {i: {(e.stage_id, e.replica_id)} for i, e in first.items()}
            victim = engine._running().supervisor.pools[0].replicas[0]
            os.kill(victim.pids[0], signal.SIGKILL)

            async def read(i: int) -> str:
                try:
                    async for event in runs[i]:
                        seen[i].add((event.stage_id, event.replica_id))
                except StageLostError:
                    return "lost"
                return "done"

            results = await asyncio.gather(*(read(i) for i in runs))
            assert sorted(results) == ["done", "done", "lost", "lost"]
            for i in runs:
                for stage_id in (0, 1):
                    assert len({r for s, r in seen[i] if s == stage_id}) <= 1
            await wait_until(lambda: engine.health().ready, "the replica to be back")


@pytest.mark.invariant("OBS-INV-001")
async def test_every_process_logs_as_the_engine_does(capfd: pytest.CaptureFixture[str]) -> None:
    """`log_json` reaches leaders and ranks: each line parses, and names its request and stage."""
    config = replace(toy_config(ranks=2), log_json=True)
    async with AsyncOmni(config=config) as engine:
        for rank in (0, 1):
            fault = {"kind": "crash", "at": 0, "stage": 1, "rank": rank}
            with pytest.raises(InternalError):
                await collect(engine, counting(1, fault=fault), request_id=f"crash-{rank}")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    loggers = {line["logger"] for line in lines}
    assert {"omnistage.stages.commands", "omnistage.stages.rank_process"} <= loggers
    for name, request_id in (("commands", "crash-0"), ("rank_process", "crash-1")):
        own = next(line for line in lines if line["logger"] == f"omnistage.stages.{name}")
        assert (own["request_id"], own["stage"]) == (request_id, 1)


@pytest.mark.invariant("STAGE-INV-205")
def test_the_engines_own_death_takes_everything_with_it(tmp_path) -> None:
    """kill -9 of the process that holds the engine: no process, no socket, no segment is left."""
    import subprocess
    import sys
    import time

    import psutil

    program = (
        "import asyncio, sys\n"
        "from omnistage.engine.async_omni import AsyncOmni\n"
        "from tests.toy.deployment import toy_config, counting\n"
        "async def main():\n"
        "    async with AsyncOmni(config=toy_config(ranks=2)) as engine:\n"
        "        events = engine.generate(counting(100000, size=50000, delay_s=0.001))\n"
        "        async for _ in events:\n"
        "            print('running', flush=True)\n"
        "asyncio.run(main())\n"
    )
    with nothing_left():
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 4
        process.kill()
        process.wait(10)
        process.stdout.close()
        give_up = time.monotonic() + 10
        while any(child.is_running() and child.status() != "zombie" for child in children):
            assert time.monotonic() < give_up, "children outlive the engine"
            time.sleep(0.01)
