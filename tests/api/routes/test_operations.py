from __future__ import annotations

import httpx
import pytest

from omnistage import __version__
from omnistage.api.lifecycle import Lifecycle, Phase
from tests.api.conftest import open_client
from tests.api.fake_engine import MODEL, FakeEngine

GENERATIONS = "/v1/images/generations"


@pytest.mark.invariant("ENTRY-INV-202")
@pytest.mark.parametrize(
    ("live", "ready", "status"), [(True, True, 200), (True, False, 503), (False, False, 503)]
)
async def test_health_says_what_the_engine_says(
    client: httpx.AsyncClient, engine: FakeEngine, live: bool, ready: bool, status: int
) -> None:
    engine.state.live, engine.state.ready = live, ready
    engine.state.reason = None if ready else "stage 0 hangs in operation 'step'"
    engine.state.stages = [{"stage_id": 0, "replicas": 1}]
    for path in ("/health", "/ready"):
        response = await client.get(path)
        assert response.status_code == status
        body = response.json()
        assert body["status"] == ("ok" if status == 200 else "unhealthy")
        assert (body["live"], body["ready"]) == (live, ready)
        assert body["reason"] == engine.state.reason
        assert body["stages"] == engine.state.stages


@pytest.mark.invariant("ENTRY-INV-202")
@pytest.mark.parametrize(
    ("phase", "health", "ready", "work"),
    [
        (Phase.STARTING, 503, 503, 503),
        (Phase.SERVING, 200, 200, 200),
        (Phase.DRAINING, 200, 503, 503),
    ],
)
async def test_the_phases_of_a_server(phase: Phase, health: int, ready: int, work: int) -> None:
    async with open_client(FakeEngine(), lifecycle=Lifecycle(phase=phase)) as client:
        assert (await client.get("/health")).status_code == health
        answer = await client.get("/ready")
        assert answer.status_code == ready
        assert answer.json()["status"] == ("ok" if phase is Phase.SERVING else phase.value)
        response = await client.post(GENERATIONS, json={"prompt": "x"})
        assert response.status_code == work
        if work == 503:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "unavailable"


@pytest.mark.invariant("ENTRY-INV-202")
async def test_a_draining_server_is_healthy_while_its_engine_lives() -> None:
    engine = FakeEngine()
    engine.state.ready, engine.state.reason = False, "shutting down"
    async with open_client(engine, lifecycle=Lifecycle(phase=Phase.DRAINING)) as client:
        assert (await client.get("/health")).status_code == 200
        engine.state.live = False
        assert (await client.get("/health")).status_code == 503


async def test_models(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    assert model["output_modalities"] == ["image"]
    assert (await client.get(f"/v1/models/{MODEL}")).json() == model
    missing = await client.get("/v1/models/other")
    assert missing.status_code == 404
    assert MODEL in missing.json()["error"]["message"]


async def test_version_metrics_and_root(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "fake 1" in metrics.text
    assert (await client.get("/")).json()["documentation"] == "/docs"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/metrics", "/version", "/v1/models", f"/v1/models/{MODEL}"]
)
async def test_head_is_answered(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.head(path)).status_code == 200
