"""The whole stage runtime on the two-stage toy, two ranks a stage."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from omnistage.contracts.errors import (
    ConfigurationError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    SlowClientError,
    UnavailableError,
)
from omnistage.contracts.outputs import OmniRequestOutput
from omnistage.engine.async_omni import AsyncOmni
from tests.toy.deployment import counting, expected, toy_config, toy_pipeline
from tests.toy.leaks import assert_idle, assert_no_tasks, nothing_left, wait_until

ROUNDS = 50


def values(events: list[OmniRequestOutput], name: str = "x") -> list[float]:
    """One number a data event; every vector must be constant."""
    vectors = [event.tensors[name] for event in events if name in event.tensors]
    assert all(np.ptp(vector) == 0 for vector in vectors)
    return [float(vector[0]) for vector in vectors]


async def collect(engine: AsyncOmni, prompt: Any, **options: Any) -> list[OmniRequestOutput]:
    return [event async for event in engine.generate(prompt, **options)]


@pytest.fixture(
    params=[{"ranks": 2}, {"ranks": 2, "process": "both"}, {"ranks": 1, "process": "inline"}],
    ids=["two-processes", "one-process", "inline"],
)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[AsyncOmni]:
    with nothing_left():
        before = asyncio.all_tasks()
        async with AsyncOmni(config=toy_config(**request.param)) as engine:
            yield engine
            await assert_idle(engine)
        await assert_no_tasks(before)


@pytest.mark.invariant("ORCH-INV-101")
@pytest.mark.invariant("IO-INV-101")
async def test_partial_outputs_arrive_in_order_and_end_once(engine: AsyncOmni) -> None:
    events = await collect(engine, counting(12, size=7))
    data = [event for event in events if event.progress is None]
    assert values(data) == expected(12)
    assert all(event.tensors["x"].shape == (7,) for event in data)
    assert [event.partial for event in data] == [True] * 11 + [False]
    assert [event.finished for event in events].count(True) == 1
    assert events[-1].finished
    assert set(events[-1].stage_durations) == {"count", "scale"}


@pytest.mark.invariant("ORCH-INV-002")
async def test_many_requests_at_once_keep_their_own_values(engine: AsyncOmni) -> None:
    choose = random.Random(1)
    counts = [choose.randint(1, 9) for _ in range(ROUNDS)]
    runs = [collect(engine, counting(n, start=1000 * i)) for i, n in enumerate(counts)]
    for i, events in enumerate(await asyncio.gather(*runs)):
        assert values(events) == expected(counts[i], start=1000 * i)


@pytest.mark.invariant("CONNECTOR-INV-002")
async def test_large_tensors_cross_stages(engine: AsyncOmni) -> None:
    events = await collect(engine, counting(3, size=300_000))
    assert values(events) == expected(3)


@pytest.mark.invariant("ORCH-INV-102")
async def test_children_are_independent_and_numbered(engine: AsyncOmni) -> None:
    runs = (collect(engine, counting(3, start=i), n=3) for i in range(ROUNDS))
    for i, events in enumerate(await asyncio.gather(*runs)):
        for child in range(3):
            own = [event for event in events if event.child_index == child]
            assert values(own) == expected(3, start=i)
        assert [event.finished for event in events].count(True) == 1


async def test_a_refused_piece_fails_its_request_alone(engine: AsyncOmni) -> None:
    bad = counting(3, fault={"kind": "invalid", "at": 1, "stage": 1})
    results = await asyncio.gather(
        collect(engine, bad), collect(engine, counting(3)), return_exceptions=True
    )
    assert isinstance(results[0], InvalidRequestError)
    assert "refuses" in str(results[0])
    assert isinstance(results[1], list)
    assert values(results[1]) == expected(3)


@pytest.mark.invariant("ERR-INV-201")
async def test_a_crash_says_nothing_of_our_internals(engine: AsyncOmni) -> None:
    crash = counting(3, fault={"kind": "crash", "at": 1, "stage": 0})
    with pytest.raises(InternalError) as caught:
        await collect(engine, crash)
    assert "secret" not in str(caught.value)
    assert values(await collect(engine, counting(2))) == expected(2)


@pytest.mark.invariant("ORCH-INV-200")
async def test_abort_at_every_point_frees_everything(engine: AsyncOmni) -> None:
    """50 aborts after a random number of events, beside requests that must not notice."""
    choose = random.Random(7)

    async def aborted(index: int) -> None:
        stop_after = choose.randint(0, 12)
        events = engine.generate(counting(10, size=20_000, delay_s=0.0005), request_id=f"a{index}")
        async for _ in events:
            stop_after -= 1
            if stop_after <= 0:
                break
        await events.aclose()

    beside = [collect(engine, counting(5, start=i)) for i in range(10)]
    results = await asyncio.gather(*(aborted(i) for i in range(ROUNDS)), *beside)
    for i, events in enumerate(results[ROUNDS:]):
        assert values(events) == expected(5, start=i)
    await wait_until(lambda: engine.num_requests == 0, "all requests to be released")
    await assert_idle(engine)


@pytest.mark.invariant("ORCH-INV-201")
async def test_abort_by_id_returns_when_nothing_is_left(engine: AsyncOmni) -> None:
    for delay_s in (0.0, 0.002, 0.01, 0.05):
        task = asyncio.create_task(
            collect(engine, counting(1000, delay_s=0.001), request_id=f"r{delay_s}")
        )
        await asyncio.sleep(delay_s)
        if engine.num_requests:
            assert await engine.abort(f"r{delay_s}")
            assert engine.num_requests == 0
        else:
            task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(result, BaseException)
    assert not await engine.abort("unknown")


async def test_a_session_streams_input_and_output(engine: AsyncOmni) -> None:
    session = engine.open_session(counting(2))
    seen: list[OmniRequestOutput] = []

    async def read() -> None:
        seen.extend([event async for event in session])

    reader = asyncio.create_task(read())
    await session.append_input(counting(3, start=50))
    await wait_until(lambda: len(values(seen)) >= 0, "the reader to run")
    await session.append_input(counting(1, start=90))
    session.end_input()
    session.end_input()
    await asyncio.wait_for(reader, 30)
    assert values(seen) == expected(2) + expected(3, 50) + expected(1, 90)
    with pytest.raises(InvalidRequestError):
        await session.append_input(counting(1))


async def test_the_stages_nobody_wants_do_not_run() -> None:
    config = toy_config(ranks=1, process="inline", pipeline=toy_pipeline(both_final=True))
    async with AsyncOmni(config=config) as engine:
        both = await collect(engine, counting(2))
        assert {event.stage_id for event in both if event.tensors} == {0, 1}
        first = await collect(engine, counting(2), output_modalities=["hidden"])
        assert {event.stage_id for event in first} == {0}
        assert first[-1].finished
        with pytest.raises(InvalidRequestError, match="image"):
            await collect(engine, counting(2), output_modalities=["image"])
        await assert_idle(engine)


@pytest.mark.invariant("ORCH-INV-103")
async def test_companions_join_at_the_next_stage() -> None:
    with nothing_left():
        config = toy_config(ranks=1, pipeline=toy_pipeline(join=True), shm_threshold_bytes=1024)
        async with AsyncOmni(config=config) as engine:
            runs = [collect(engine, counting(1, start=i, size=500)) for i in range(5)]
            for i, events in enumerate(await asyncio.gather(*runs)):
                assert values(events) == expected(1, start=i)
                assert values(events, "negative.x") == expected(1, start=100 + i)
            await assert_idle(engine)


@pytest.mark.invariant("ORCH-INV-202")
async def test_a_slow_client_pauses_its_request_and_is_cancelled() -> None:
    limits = {"slow_client_timeout_s": 3.0}
    async with AsyncOmni(config=toy_config(ranks=1, window=3, limits=limits)) as engine:
        choose = random.Random(3)
        slow = [engine.generate(counting(200, start=i)) for i in range(ROUNDS)]

        async def read(events: Any, count: int) -> None:
            for _ in range(count):
                await anext(events)

        await asyncio.gather(*(read(events, choose.randint(1, 8)) for events in slow))
        assert values(await collect(engine, counting(50))) == expected(50)
        await wait_until(lambda: engine.num_requests == 0, "the slow clients' cancellation")
        for events in slow:
            with pytest.raises(SlowClientError, match=r"for 3 s"):
                await anext(events)
        await assert_idle(engine)


@pytest.mark.invariant("ORCH-INV-104")
async def test_overload_is_refused_at_once() -> None:
    limits = {"max_inflight_requests": 3}
    async with AsyncOmni(config=toy_config(ranks=1, limits=limits)) as engine:
        held = [engine.generate(counting(500, delay_s=0.001)) for _ in range(3)]
        for events in held:
            await anext(events)
        for _ in range(ROUNDS):
            with pytest.raises(OverloadedError) as caught:
                await collect(engine, counting(1))
            assert caught.value.status == 429
            assert caught.value.retry_after_s
        for events in held:
            await events.aclose()
        await wait_until(lambda: engine.num_requests == 0, "places to be free again")
        assert values(await collect(engine, counting(1))) == expected(1)
        await assert_idle(engine)


async def test_a_request_past_its_deadline_ends() -> None:
    async with AsyncOmni(config=toy_config(ranks=1)) as engine:
        with pytest.raises(DeadlineExceededError):
            await collect(engine, counting(10_000, delay_s=0.001), timeout_s=0.2)
        await wait_until(lambda: engine.num_requests == 0, "the request to be released")
        await assert_idle(engine)


@pytest.mark.invariant("STAGE-INV-200")
async def test_drain_finishes_what_runs_and_shutdown_twice_is_fine() -> None:
    with nothing_left():
        engine = AsyncOmni(config=toy_config(ranks=2))
        await engine.start()
        running = asyncio.create_task(collect(engine, counting(30, delay_s=0.001)))
        await asyncio.sleep(0.02)
        assert await engine.drain(20.0)
        with pytest.raises(UnavailableError):
            await collect(engine, counting(1))
        assert values(await running) == expected(30)
        await asyncio.gather(engine.shutdown(), engine.shutdown())
        await engine.shutdown()


async def test_shutdown_in_the_middle_fails_what_runs() -> None:
    with nothing_left():
        engine = AsyncOmni(config=toy_config(ranks=2))
        await engine.start()
        running = asyncio.create_task(collect(engine, counting(10_000, delay_s=0.001)))
        await asyncio.sleep(0.05)
        await engine.shutdown()
        with pytest.raises(UnavailableError):
            await running


@pytest.mark.invariant("STAGE-INV-101")
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_stage_that_cannot_load_ends_the_start_with_its_reason(ranks: int) -> None:
    with nothing_left():
        engine = AsyncOmni(config=toy_config(ranks=ranks, options={"load_error": "no such file"}))
        with pytest.raises(InvalidRequestError, match="no such file"):
            await engine.start()
        assert not engine.health().live


async def test_an_unknown_runtime_is_a_configuration_error() -> None:
    import dataclasses

    config = toy_config(ranks=1)
    stage = dataclasses.replace(config.stages[1].stage, runtime="tests.toy.nowhere:Runtime")
    stages = (config.stages[0], dataclasses.replace(config.stages[1], stage=stage))
    with nothing_left(), pytest.raises(ConfigurationError, match="nowhere"):
        await AsyncOmni(config=dataclasses.replace(config, stages=stages)).start()
