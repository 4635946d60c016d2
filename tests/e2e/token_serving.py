"""A token model behind real processes, one a stage; the engine and the HTTP side live in the test's
own process, so that a test can look into all of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import psutil

from omnistage.api.settings import ApiSettings
from omnistage.engine.async_omni import AsyncOmni
from tests.api.live_server import live_server
from tests.checkpoints import checkpoint
from tests.e2e.serving import GUARD_S

NAME = "tiny"
CHAT, COMPLETIONS, SPEECH = "/v1/chat/completions", "/v1/completions", "/v1/audio/speech"
QUICK_RESTART = {"max_restarts": 10, "backoff_s": 0.1}


@dataclass
class Served:
    engine: AsyncOmni
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    url: str

    def pids(self) -> list[int]:
        """By stage."""
        pools = self.engine._running().supervisor.pools
        return [pool.replicas[0].pids[0] for pool in pools]

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of the test's own process ("engine") and of each stage's."""
        found = {"engine": psutil.Process().memory_info().rss}
        for stage, pid in enumerate(self.pids()):
            found[f"stage {stage}"] = psutil.Process(pid).memory_info().rss
        return {name: size_bytes / 2**20 for name, size_bytes in found.items()}

    async def stats(self, stage: int) -> dict[str, int]:
        answer: dict[str, int] = await self.engine.call_stage(stage, "token_stats")
        return answer

    async def held(self) -> dict[str, int]:
        """All that is held for requests, by name; empty when nothing is."""
        found = {"requests": self.engine.num_requests}
        found["payloads"] = self.engine._running().entry.outstanding()
        for stage, report in enumerate(await self.engine.collective_rpc("held_resources")):
            found |= {f"stage {stage}: {name}": count for name, count in report.items()}
        for stage, count in enumerate(await self.engine.collective_rpc("executor_holds")):
            found[f"stage {stage}: executor"] = count
        for stage in self.token_stages:
            found[f"stage {stage}: blocks"] = (await self.stats(stage))["kv_blocks_used"]
        return {name: count for name, count in found.items() if count}

    async def held_after_abort(self) -> dict[str, int]:
        """But for late outputs: one that is being made cannot be interrupted."""
        held = await self.held()
        return {name: count for name, count in held.items() if not name.endswith("late_outputs")}

    @property
    def token_stages(self) -> list[int]:
        kinds = [stage.stage.execution_type for stage in self.engine.config.stages]
        return [stage for stage, kind in enumerate(kinds) if kind == "llm_ar"]

    async def until_free(self) -> None:
        give_up = time.monotonic() + GUARD_S
        while held := await self.held():
            assert time.monotonic() < give_up, f"still held after {GUARD_S} s: {held}"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    family: str, api: ApiSettings | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serve the tiny checkpoint of `family`."""
    settings = {"device": "cpu", "log_level": "error", "restart": QUICK_RESTART} | settings
    engine = AsyncOmni(str(checkpoint(family)), served_model_name=NAME, **settings)
    async with (
        engine,
        live_server(engine, api or ApiSettings()) as url,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=url, timeout=GUARD_S, trust_env=False) as http,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="-", timeout=GUARD_S, max_retries=0
        ) as client,
    ):
        yield Served(engine, http, client, url)


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {GUARD_S} s for {what}"
        await asyncio.sleep(0.005)


def said(content: Any = "hello") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def events_of(text: str) -> list[Any]:
    """What the `data:` lines of a stream hold, `[DONE]` as it is."""
    found = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in found]
