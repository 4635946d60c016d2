"""Start, drain and shutdown at any moment, several times and at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from omnistage.config.resolved import RestartPolicy
from omnistage.contracts.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    StageLostError,
    UnavailableError,
)
from omnistage.engine.async_omni import AsyncOmni
from tests.engine.test_toy_pipeline import collect, values
from tests.toy.deployment import counting, expected, toy_config
from tests.toy.leaks import nothing_left, wait_until

LAYOUTS = [{"ranks": 2}, {"ranks": 1, "process": "inline"}]


@pytest.mark.invariant("STAGE-INV-200")
@pytest.mark.parametrize("layout", LAYOUTS, ids=["processes", "inline"])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.2])
async def test_a_shutdown_during_the_start_ends_both(layout: dict, after_s: float) -> None:
    with nothing_left():
        engine = AsyncOmni(config=toy_config(**layout))
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(after_s)
        await asyncio.wait_for(asyncio.gather(engine.shutdown(), engine.shutdown()), 20)
        (outcome,) = await asyncio.gather(starting, return_exceptions=True)
        assert outcome is None or isinstance(outcome, UnavailableError)
        with pytest.raises(UnavailableError):
            await collect(engine, counting(1))
        await engine.shutdown()


@pytest.mark.invariant("STAGE-INV-200")
async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    with nothing_left():
        starting = asyncio.create_task(AsyncOmni(config=toy_config(ranks=2)).start())
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


@pytest.mark.invariant("STAGE-INV-200")
async def test_a_shutdown_while_a_replica_waits_to_restart() -> None:
    policy = RestartPolicy(max_restarts=9, window_s=100, backoff_s=60.0, max_backoff_s=60.0)
    with nothing_left():
        engine = AsyncOmni(config=toy_config(ranks=1, restart=policy))
        await engine.start()
        replica = engine._running().supervisor.pools[0].replicas[0]
        os.kill(replica.pids[0], signal.SIGKILL)
        await wait_until(lambda: replica.state == "restarting", "the death to be seen")
        waiting = asyncio.create_task(collect(engine, counting(1)))
        await wait_until(lambda: engine.num_requests == 1, "a request that waits")
        assert not engine.health().live
        await asyncio.wait_for(engine.shutdown(), 20)
        with pytest.raises(UnavailableError):
            await waiting


@pytest.mark.invariant("STAGE-INV-209")
@pytest.mark.parametrize("layout", LAYOUTS, ids=["processes", "inline"])
async def test_after_a_drain_the_stages_have_ended(layout: dict) -> None:
    with nothing_left():
        async with AsyncOmni(config=toy_config(**layout)) as engine:
            assert values(await collect(engine, counting(2))) == expected(2)
            assert await engine.drain(10.0)
            replicas = [r for pool in engine._running().supervisor.pools for r in pool.replicas]
            await wait_until(lambda: all(r.state == "stopped" for r in replicas), "their end")
            assert not engine.health().ready


async def test_drain_gives_up_after_its_time() -> None:
    async with AsyncOmni(config=toy_config(ranks=1, process="inline")) as engine:
        events = engine.generate(counting(10_000, delay_s=0.001))
        await anext(events)
        assert not await engine.drain(0.05)
        await events.aclose()


@pytest.mark.invariant("STAGE-INV-203")
async def test_an_inline_stage_that_hangs_is_lost_and_said_to_be() -> None:
    limits = {"shutdown_timeout_s": 0.3}
    config = toy_config(
        ranks=1,
        process="inline",
        operation_limits_s={"step": 0.2},
        heartbeat_timeout_s=1.0,
        limits=limits,
    )
    async with AsyncOmni(config=config) as engine:
        hang = counting(1, delay_s=2.0)
        with pytest.raises(StageLostError, match="hung"):
            await collect(engine, hang)
        assert not engine.health().live
        with pytest.raises(UnavailableError, match="down"):
            await collect(engine, counting(1))
    give_up = time.monotonic() + 20
    import threading

    while any(thread.name.startswith("stage-") for thread in threading.enumerate()):
        assert time.monotonic() < give_up, "the thread ends when its work returns"
        await asyncio.sleep(0.05)


@pytest.mark.invariant("ORCH-INV-203")
async def test_a_call_to_a_lost_replica_fails_at_once_and_a_slow_one_in_time() -> None:
    with nothing_left():
        async with AsyncOmni(config=toy_config(ranks=1)) as engine:
            with pytest.raises(InvalidRequestError):
                await engine.collective_rpc("nonsense")
            events = engine.generate(counting(2, delay_s=2.0))
            reading = asyncio.create_task(anext(events))
            replica = engine._running().supervisor.pools[0].replicas[0]
            await wait_until(
                lambda: bool(replica.status and replica.status.operation), "a running command"
            )
            with pytest.raises(DeadlineExceededError, match="'executor_holds'"):
                await engine.collective_rpc("executor_holds", timeout_s=0.1)
            calling = asyncio.create_task(engine.collective_rpc("executor_holds"))
            await asyncio.sleep(0.05)
            os.kill(replica.pids[0], signal.SIGKILL)
            with pytest.raises(StageLostError):
                await asyncio.wait_for(calling, 10)
            with pytest.raises(StageLostError):
                await reading
            await wait_until(lambda: engine.health().ready, "the replica to be back")
            assert await engine.collective_rpc("executor_holds") == [0, 0]


@pytest.mark.invariant("STAGE-INV-200")
async def test_two_hundred_lives_of_an_engine_leave_nothing() -> None:
    with nothing_left():
        for _ in range(200):
            async with AsyncOmni(config=toy_config(ranks=1, process="inline")) as engine:
                await collect(engine, counting(1))


@pytest.mark.invariant("ORCH-INV-200")
async def test_a_thousand_requests_leave_nothing() -> None:
    with nothing_left():
        async with AsyncOmni(config=toy_config(ranks=1, shm_threshold_bytes=1024)) as engine:
            for _ in range(10):
                runs = (collect(engine, counting(1, size=300)) for _ in range(100))
                for events in await asyncio.gather(*runs):
                    assert values(events) == expected(1)
            await wait_until(lambda: engine.num_requests == 0, "all to be released")
            tasks = {task.get_name() for task in asyncio.all_tasks()}
            assert len([name for name in tasks if name in ("orchestrator", "watchdog")]) == 2
            assert len(tasks) <= 4, tasks
