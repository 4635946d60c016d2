from __future__ import annotations

import logging

import httpx
import pytest

from omnistage.contracts.errors import OverloadedError
from tests.api.fake_engine import FakeEngine

GENERATIONS = "/v1/images/generations"


@pytest.mark.invariant("ENTRY-INV-101")
async def test_a_given_id_comes_back_and_marks_the_engines(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for _ in range(2):
        headers = {"X-Request-Id": "trace:42/a"}
        response = await client.post(GENERATIONS, json={"prompt": "x"}, headers=headers)
        assert response.headers["x-request-id"] == "trace:42/a"
    ids = [call.request_id for call in engine.calls]
    assert all(request_id.startswith("trace:42/a") for request_id in ids)
    assert len(set(ids)) == 2


@pytest.mark.invariant("ENTRY-INV-101")
async def test_without_one_an_id_is_made_for_every_answer(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    made = await client.post(GENERATIONS, json={"prompt": "x"})
    engine.error = OverloadedError("full")
    failed = await client.post(GENERATIONS, json={"prompt": "x"})
    unknown = await client.get("/nothing")
    ids = [response.headers["x-request-id"] for response in (made, failed, unknown)]
    assert engine.calls[0].request_id == ids[0]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "a\tb", "é", '"'])
async def test_an_id_of_other_characters_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, given: str
) -> None:
    headers = {b"x-request-id": given.encode()}
    response = await client.post(GENERATIONS, json={"prompt": "x"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Id"
    assert response.headers["x-request-id"] not in ("", given)
    assert engine.calls == []


async def test_a_valid_traceparent_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    trace = f"00-{'a1' * 16}-{'b2' * 8}-01"
    for given in (trace, "nonsense"):
        headers = {"traceparent": given}
        await client.post(GENERATIONS, json={"prompt": "x"}, headers=headers)
    assert [call.trace_context for call in engine.calls] == [trace, None]


async def test_metrics_have_templates_of_routes_and_known_methods(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.get("/v1/models/one")
    await client.get("/random/4711")
    await client.request("BREW", "/health")
    assert engine.metrics.requests == [
        ("/v1/models/{model_id}", "GET", 404),
        ("unmatched", "GET", 404),
        ("/health", "OTHER", 405),
    ]


async def test_one_access_line_a_request(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="omnistage.access"):
        await client.get("/v1/models")
        await client.get("/nothing%0A forged")
    lines = [record.getMessage() for record in caplog.records if record.name == "omnistage.access"]
    assert [line.split(" ")[:3] for line in lines] == [
        ["GET", "/v1/models", "200"],
        ["GET", "/nothing\\n", "forged"],
    ]
