from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from omnistage.api.disconnect import until_disconnect
from omnistage.api.settings import ApiSettings
from omnistage.config.resolved import EngineLimits
from omnistage.contracts.errors import RequestCancelledError
from tests.api.fake_engine import FakeEngine
from tests.api.live_server import GUARD_S, connection, live_server, raw_post

GENERATIONS = "/v1/images/generations"
CHAT = "/v1/chat/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "a cat"}]}


@pytest.mark.invariant("ENTRY-INV-200")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATIONS, {"prompt": "x"}),
        (GENERATIONS, {"prompt": "x", "stream": True, "partial_images": 2}),
        (CHAT, CHAT_BODY),
        (CHAT, {**CHAT_BODY, "stream": True}),
    ],
)
async def test_hanging_up_aborts_the_request(path: str, body: dict[str, object]) -> None:
    engine = FakeEngine()
    engine.hold.clear()
    async with live_server(engine) as url:
        async with connection(url) as (_, writer), asyncio.timeout(GUARD_S):
            writer.write(raw_post(path, json.dumps(body).encode()))
            await engine.running.wait()
        async with asyncio.timeout(GUARD_S):
            await engine.aborted.wait()
            await engine.idle.wait()
            await engine.metrics.recorded.wait()
        assert engine.metrics.requests == [(path, "POST", 499)]
        assert engine.aborted_ids == [engine.calls[0].request_id]
        engine.hold.set()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post(path, json=body)).status_code == 200


async def test_hanging_up_inside_the_body_starts_nothing() -> None:
    engine = FakeEngine()
    async with live_server(engine) as url:
        async with connection(url) as (_, writer):
            writer.write(raw_post(GENERATIONS, b'{"pro', "Content-Length: 100"))
            await writer.drain()
        async with asyncio.timeout(GUARD_S):
            await engine.metrics.recorded.wait()
    assert engine.metrics.requests == [(GENERATIONS, "POST", 499)]
    assert engine.calls == []


@pytest.mark.invariant("ENTRY-INV-200")
@pytest.mark.parametrize(("path", "start"), [(CHAT, CHAT_BODY), (GENERATIONS, {"prompt": "x"})])
async def test_a_stream_that_nobody_reads_is_cancelled(path: str, start: dict[str, object]) -> None:
    engine = FakeEngine()
    body = {**start, "stream": True, "size": "2048x2048", "n": 6, "output_format": "jpeg"}
    engine.picture_noise = True
    limits = EngineLimits(slow_client_timeout_s=0.2)
    engine.config = replace(engine.config, limits=limits)
    async with live_server(engine, ApiSettings()) as url, connection(url) as (_, writer):
        writer.write(raw_post(path, json.dumps(body).encode()))
        async with asyncio.timeout(GUARD_S):
            await engine.metrics.recorded.wait()
        assert engine.metrics.requests == [(path, "POST", 499)]


async def test_a_large_body_gets_its_answer_before_the_connection_closes() -> None:
    settings = ApiSettings(max_body_bytes=10_000)
    async with live_server(FakeEngine(), settings) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            response = await client.post(GENERATIONS, json={"prompt": "x" * 3_000_000})
        assert response.status_code == 413
        assert response.headers["connection"] == "close"

        async with connection(url) as (reader, writer), asyncio.timeout(GUARD_S):
            headers = ("Content-Length: 99999999", "Expect: 100-continue")
            writer.write(raw_post(GENERATIONS, b"", *headers))
            assert b" 413 " in await reader.readline()


async def test_the_result_comes_through_and_nothing_is_left_running() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> str:
        return "done"

    async def broken() -> str:
        raise ValueError("broken")

    before = len(asyncio.all_tasks())
    assert await until_disconnect(receive, work()) == "done"
    with pytest.raises(ValueError, match="broken"):
        await until_disconnect(receive, broken())
    assert len(asyncio.all_tasks()) == before


async def test_a_hang_up_cancels_the_work_and_its_own_cancellation_too() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def hang_up() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def stay() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(RequestCancelledError):
        await until_disconnect(hang_up, work())
    assert ended.is_set()
    ended.clear()
    outer = asyncio.create_task(until_disconnect(stay, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert ended.is_set()
