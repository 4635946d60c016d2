"""A tiny Qwen3 in a process of its own: aborts, clients that read nothing, 500 requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
import pytest_asyncio

from omnistage.contracts.errors import RequestCancelledError
from omnistage.contracts.sampling import OmniTokenSamplingParams
from tests.api.live_server import connection, raw_post
from tests.e2e.serving import GUARD_S
from tests.e2e.token_serving import CHAT, COMPLETIONS, Served, events_of, said, serving, until
from tests.toy.leaks import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SLOW_CLIENT_S = 3.0
LONG = 1900
REQUESTS, AT_ONCE = 500, 10
GROWTH_MIB = 8.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text() -> AsyncIterator[Served]:
    with nothing_left():
        limits = {"slow_client_timeout_s": SLOW_CLIENT_S}
        # Little room in the cache, so that requests also evict and preempt each other.
        async with serving(
            "qwen3", limits=limits, kv_cache_gib=0.005, max_num_batched_tokens=64
        ) as running:
            yield running


@pytest.mark.parametrize("phase", ["prefill", "decode", "queue"])
async def test_an_abort_frees_everything_and_ends_the_stream(
    text: Served, phase: str, record_property: Callable[[str, object], None]
) -> None:
    params = OmniTokenSamplingParams(max_tokens=64, min_tokens=64, temperature=0.0)
    prompt = "red " * (LONG if phase == "prefill" else 3)
    if phase == "decode":
        params = OmniTokenSamplingParams(max_tokens=LONG, min_tokens=LONG, temperature=0.0)
    outputs = text.engine.generate({"prompt": prompt}, params, request_id=phase)
    first = asyncio.ensure_future(anext(outputs))
    if phase == "decode":
        await first
    if phase == "prefill":
        await until_computing(text)
    await asyncio.sleep(0)
    began_s = time.perf_counter()
    assert await text.engine.abort(phase)
    ms = round(1000 * (time.perf_counter() - began_s), 1)
    assert await text.held_after_abort() == {}
    await text.until_free()
    with pytest.raises(RequestCancelledError):
        await (anext(outputs) if phase == "decode" else first)
    record_property("abort_ms", ms)
    print(f"abort in {phase}: {ms} ms")


async def until_computing(text: Served) -> None:
    give_up = time.monotonic() + GUARD_S
    while (await text.stats(0))["kv_blocks_used"] == 0:
        assert time.monotonic() < give_up, f"nothing is computed for {GUARD_S} s"


async def test_closing_the_iterator_aborts(text: Served) -> None:
    params = OmniTokenSamplingParams(max_tokens=LONG, min_tokens=LONG)
    outputs = text.engine.generate({"prompt": "red"}, params)
    await anext(outputs)
    assert (await text.stats(0))["kv_blocks_used"] > 0
    await outputs.aclose()
    await text.until_free()


async def test_a_client_that_reads_nothing_blocks_nobody_and_is_cut_off(text: Served) -> None:
    """Its stream fills its socket; others are answered meanwhile; then it is ended for it."""
    many = {"messages": said(), "stream": True, "max_tokens": LONG, "min_tokens": LONG, "n": 8}
    many |= {"logprobs": True, "top_logprobs": 20}
    async with connection(text.url) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(raw_post(CHAT, json.dumps(many).encode()))
        own_port = writer.get_extra_info("sockname")[1]
        await until(lambda: text.engine.num_requests == 1, "the lazy client to be taken in")
        for number in range(4):
            assert await answered(text, number)
        assert text.engine.num_requests == 1, "it was not lazy for long enough"
        await until(lambda: text.engine.num_requests == 0, "the lazy client to be cut off")
        assert own_port in peer_ports(text), "it is the port that we look for"
        await until(lambda: own_port not in peer_ports(text), "its connection to be closed")
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(ConnectionError):
            assert b"[DONE]" not in await reader.read()
    await text.until_free()


def peer_ports(text: Served) -> set[int]:
    """Ports of the clients to which the server, in this process, still holds a connection."""
    served = int(text.url.rpartition(":")[2])
    held = psutil.Process().net_connections("tcp")
    return {one.raddr.port for one in held if one.raddr and one.laddr.port == served}


async def test_a_process_killed_mid_stream_ends_it_and_comes_back(text: Served) -> None:
    body = {"messages": said(), "stream": True, "max_tokens": LONG, "min_tokens": LONG}
    lines = ""
    before = text.pids()
    victim = before[0]
    async with text.http.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            lines += f"{line}\n"
            if victim and lines.count("content") > 3:
                os.kill(victim, signal.SIGKILL)
                victim = 0
    last = events_of(lines)[-1]
    assert (last["error"]["type"], last["error"]["code"]) == ("stage_lost", 503)
    assert await answered(text, 1)
    assert text.pids() != before
    await text.until_free()


async def test_memory_stays_as_it_is_over_500_requests(
    text: Served, record_property: Callable[[str, object], None]
) -> None:
    """Prompts that differ, so that nothing is found in the prefix cache and blocks are evicted."""
    await ask_often(text, range(REQUESTS // 2))
    before, stats = text.rss_mib(), await text.stats(0)
    await ask_often(text, range(REQUESTS // 2, REQUESTS))
    after = text.rss_mib()
    record_property("rss_mib", {"before": before, "after": after})
    print(f"resident MiB after {REQUESTS // 2} requests {before}, after {REQUESTS} {after}")
    for name, size_mib in after.items():
        assert size_mib - before[name] < GROWTH_MIB, (name, before, after)
    assert (await text.stats(0))["evictions"] > stats["evictions"]


async def ask_often(text: Served, numbers: range) -> None:
    for first in numbers[::AT_ONCE]:
        async with asyncio.timeout(GUARD_S):
            await asyncio.gather(*(answered(text, first + i) for i in range(AT_ONCE)))
    await text.until_free()


async def answered(text: Served, number: int) -> bool:
    """One short request; each seventh with a schema of its own, each fifth hangs up."""
    dice = random.Random(number)
    words = " ".join(dice.choices(["red", "blue", "cat", "dog", "house"], k=30))
    body: dict[str, Any] = {"prompt": f"{number} {words}", "max_tokens": 8, "seed": number}
    if number % 7 == 0:
        body["guided_choice"] = [f"answer {number}", f"question {number}"]
    if number % 5 == 4:
        async with text.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                return True
    answer = await text.http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["choices"][0]["text"] is not None)
