from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from omnistage.api.settings import ApiSettings
from tests.api.conftest import open_client
from tests.api.fake_engine import FakeEngine

GENERATIONS = "/v1/images/generations"
JSON = {"content-type": "application/json"}


FORM = {"content-type": "multipart/form-data; boundary=x"}
FORM_START = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


@pytest.mark.invariant("ENTRY-INV-103")
@pytest.mark.parametrize("route", [GENERATIONS, "/v1/chat/completions", "/v1/images/edits"])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_large_body_is_refused_declared_or_not(route: str, declared: bool) -> None:
    engine = FakeEngine()
    is_form = route.endswith("edits")
    body = (FORM_START if is_form else b"").ljust(1100)
    async with open_client(engine, ApiSettings(max_body_bytes=1000)) as client:
        response = await client.post(
            route, content=body if declared else chunks(body), headers=FORM if is_form else JSON
        )
    assert response.status_code == 413, response.text
    assert response.json()["error"]["type"] == "payload_too_large"
    assert "1000" in response.json()["error"]["message"]
    assert engine.metrics.requests[-1][2] == 413


async def test_a_body_of_exactly_the_limit_passes() -> None:
    body = b'{"prompt": "x"}'.ljust(1000)
    async with open_client(FakeEngine(), ApiSettings(max_body_bytes=1000)) as client:
        assert (await client.post(GENERATIONS, content=body, headers=JSON)).status_code == 200


async def test_a_body_that_never_arrives_ends() -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with open_client(FakeEngine(), ApiSettings(body_timeout_s=0.05)) as client:
        response = await client.post(GENERATIONS, content=stuck(), headers=JSON)
    assert response.status_code == 400
    assert "did not arrive" in response.json()["error"]["message"]


async def test_open_requests_are_bounded() -> None:
    engine = FakeEngine()
    engine.hold.clear()
    async with open_client(engine, ApiSettings(max_open_requests=1)) as client:
        first = asyncio.create_task(client.post(GENERATIONS, json={"prompt": "x"}))
        await engine.running.wait()
        second = await client.post(GENERATIONS, json={"prompt": "x"})
        assert second.status_code == 429
        assert second.headers["retry-after"] == "1"
        engine.hold.set()
        assert (await first).status_code == 200
        assert (await client.post(GENERATIONS, json={"prompt": "x"})).status_code == 200


async def test_the_bytes_of_all_open_bodies_are_bounded_and_given_back() -> None:
    engine = FakeEngine()
    engine.hold.clear()
    body = b'{"prompt": "x"}'.ljust(600)
    async with open_client(engine, ApiSettings(max_open_body_bytes=1000)) as client:
        first = asyncio.create_task(client.post(GENERATIONS, content=body, headers=JSON))
        await engine.running.wait()
        second = await client.post(GENERATIONS, content=body, headers=JSON)
        assert (second.status_code, second.json()["error"]["type"]) == (429, "overloaded")
        engine.hold.set()
        assert (await first).status_code == 200
        for _ in range(3):
            assert (await client.post(GENERATIONS, content=body, headers=JSON)).status_code == 200
