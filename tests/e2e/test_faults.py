"""What goes wrong while requests run: clients hang up, the replica's process dies or hangs.

A real replica process; the engine and the HTTP side live in the test's own process, so that the
tests can look into both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from omnistage.cli.http_client import GENERATIONS, open_picture, read_pictures
from omnistage.engine.async_omni import AsyncOmni
from tests.api.live_server import live_server
from tests.e2e.serving import GUARD_S, body, model
from tests.toy.leaks import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HEARTBEAT_TIMEOUT_S = 6.0
"""Short for a hang to be found soon, long for a busy machine."""
SLOW_DECODE = {"size": "640x640", "num_inference_steps": 2, "true_cfg_scale": 1.0}
"""Decoding takes nearly all of it, and seconds."""


@dataclass
class Running:
    engine: AsyncOmni
    client: httpx.AsyncClient

    async def post(self, **fields: Any) -> httpx.Response:
        return await self.client.post(GENERATIONS, json=body(**fields))

    def start(self, **fields: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.post(**fields))

    @property
    def replica(self) -> dict[str, Any]:
        replica: dict[str, Any] = self.engine.health().stages[0]["replicas"][0]
        return replica

    @property
    def replica_pid(self) -> int:
        (process,) = [
            child
            for child in psutil.Process().children()
            if "omnistage.stages.replica_process" in child.cmdline()
        ]
        return process.pid

    def busy_with(self, operation: str, requests: int = 1) -> Callable[[], bool]:
        def holds() -> bool:
            replica = self.replica
            return (replica["operation"], replica["requests"]) == (operation, requests)

        return holds

    async def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.client.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until_idle(self) -> None:
        """Nothing is held: not by the engine, not in the replica, and metrics and health agree."""
        await until(lambda: self.engine.num_requests == 0, "the engine to hold no request")
        held: list[dict[str, int]] = [{"unknown": 1}]
        async with asyncio.timeout(GUARD_S):
            while any(count for report in held for count in report.values()):
                held = await self.engine.collective_rpc("held_resources")
        await until(lambda: self.replica["requests"] == 0, "health to say that it is idle")
        for gauge in ("omnistage_num_requests_running", "omnistage_num_requests_waiting"):
            assert await self.metric(gauge) == 0

    async def assert_works(self) -> None:
        (data,) = read_pictures(await self.post(seed=1))
        assert open_picture(data).size == (64, 64)


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {GUARD_S} s for {what}"
        await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    with nothing_left():
        engine = AsyncOmni(
            model(),
            device="cpu",
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            restart={"max_restarts": 10, "backoff_s": 0.5},
            log_level="error",
        )
        async with (
            engine,
            live_server(engine) as url,  # type: ignore[arg-type]
            httpx.AsyncClient(base_url=url, timeout=GUARD_S, trust_env=False) as client,
        ):
            yield Running(engine, client)


async def hang_up(request: asyncio.Task[httpx.Response]) -> None:
    """Cancelling it closes the connection."""
    assert not request.done(), request.result().text
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


def endless(running: Running, seed: int = 1) -> asyncio.Task[httpx.Response]:
    return running.start(seed=seed, num_inference_steps=200, size="256x256", true_cfg_scale=4.0)


async def test_a_client_hangs_up_mid_step(running: Running) -> None:
    aborted = await running.metric("omnistage_requests_success_total", finished_reason="abort")
    request = endless(running)
    await until(running.busy_with("step"), "a step")
    await hang_up(request)
    await running.until_idle()
    now = await running.metric("omnistage_requests_success_total", finished_reason="abort")
    assert now == aborted + 1
    await running.assert_works()


async def test_a_client_hangs_up_while_its_request_waits(running: Running) -> None:
    """The one that runs is not disturbed, and the one that waited is never begun."""
    begun = await running.metric("omnistage_diffusion_exec_seconds_count")
    first = running.start(seed=1, num_inference_steps=60, size="256x256")
    await until(lambda: running.replica["requests"] == 1, "the first to arrive")
    second = endless(running, seed=2)
    await until(lambda: running.replica["requests"] == 2, "the second to arrive")
    await hang_up(second)
    assert len(read_pictures(await first)) == 1
    await running.until_idle()
    assert await running.metric("omnistage_diffusion_exec_seconds_count") == begun + 1
    await running.assert_works()


async def test_a_client_hangs_up_while_its_picture_is_decoded(running: Running) -> None:
    request = running.start(seed=1, **SLOW_DECODE)
    await until(running.busy_with("decode"), "the decoder at work")
    made = await running.metric("omnistage_images_generated_total")
    await hang_up(request)
    await running.until_idle()
    assert await running.metric("omnistage_images_generated_total") == made
    await running.assert_works()


async def test_the_replicas_process_is_killed_mid_request(running: Running) -> None:
    """Its request fails with 503 and says why; health says so in between; the next one works."""
    request = endless(running)
    await until(running.busy_with("step"), "a step")
    victim = running.replica_pid
    os.kill(victim, signal.SIGKILL)
    answer = await request
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "stage_lost")
    assert int(answer.headers["retry-after"]) >= 1
    health = await running.client.get("/health")
    assert (health.status_code, health.json()["live"]) == (503, False)
    assert "SIGKILL" in health.json()["reason"]
    await running.assert_works()
    assert running.replica_pid != victim
    assert (await running.client.get("/health")).status_code == 200
    assert await running.metric("omnistage_replica_restarts_total") >= 1
    await running.until_idle()


async def test_the_replicas_process_hangs(running: Running) -> None:
    """SIGSTOP: no heartbeat. Probes see it, the request fails, a new process takes over."""
    request = endless(running)
    await until(running.busy_with("step"), "a step")
    victim = running.replica_pid
    os.kill(victim, signal.SIGSTOP)
    assert (await running.client.get("/health")).status_code == 200
    await until(lambda: not running.engine.health().live, "the silence to be noticed")
    for probe in ("/health", "/ready"):
        unhealthy = await running.client.get(probe)
        assert (unhealthy.status_code, unhealthy.json()["live"]) == (503, False)
        assert "diffusion" in unhealthy.json()["reason"]
    answer = await request
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "stage_lost")
    assert "no sign of life" in answer.json()["error"]["message"]
    await running.assert_works()
    assert not psutil.pid_exists(victim)
    assert (await running.client.get("/health")).status_code == 200
    await running.until_idle()
