"""A tiny Qwen3-Omni, one process a stage: requests are aborted, processes die, memory stays."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from omnistage.api.audio_encode import encode_audio
from omnistage.contracts.errors import RequestCancelledError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import OmniRequestOutput
from omnistage.contracts.sampling import (
    GenericParams,
    OmniTokenSamplingParams,
    SamplingParams,
)
from tests.api.sounds import RATE_HZ, chirp
from tests.e2e.serving import GUARD_S
from tests.e2e.token_serving import CHAT, SPEECH, Served, events_of, said, serving
from tests.toy.leaks import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

THINKER, TALKER, CODE2WAV = 0, 1, 2
TALKERS_END = 64 + 6
"""Of the tiny checkpoint: the first id that is no code, and its place behind that."""
LONG = 3000
"""Tokens: seconds of work, of which a test takes the beginning."""
Seen = dict[str, int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def omni() -> AsyncIterator[Served]:
    with nothing_left():
        async with serving("qwen3-omni", max_num_batched_tokens=64) as running:
            yield running


def params(text_tokens: int, codes: int) -> list[SamplingParams]:
    """Neither ends before its count."""
    return [
        OmniTokenSamplingParams(max_tokens=text_tokens, min_tokens=text_tokens, temperature=0.0),
        OmniTokenSamplingParams(max_tokens=codes, min_tokens=codes, seed=1),
        GenericParams(),
    ]


class Listening:
    """A request that a task reads to its end; what it saw, and how it ended."""

    def __init__(self, omni: Served, request_id: str, prompt: str, text: int, codes: int) -> None:
        self.seen: Seen = {"text": 0, "audio": 0}
        self.request_id = request_id
        self.ended_s = 0.0
        self._outputs = omni.engine.generate(
            {"messages": said(prompt)},
            request_id=request_id,
            sampling_params_list=params(text, codes),
            output_modalities=("text", "audio"),
        )
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for output in self._outputs:
                self._count(output)
        finally:
            self.ended_s = time.perf_counter()

    def _count(self, output: OmniRequestOutput) -> None:
        if output.progress is None and output.modality in (Modality.TEXT, Modality.AUDIO):
            self.seen[output.modality] += 1


async def in_prefill(omni: Served, seen: Seen) -> bool:
    stats = await omni.stats(THINKER)
    return stats["running"] == 1 and stats["kv_blocks_used"] > 0 and not seen["text"]


async def in_decode(omni: Served, seen: Seen) -> bool:
    return seen["text"] >= 3


async def at_the_talker(omni: Served, seen: Seen) -> bool:
    """Its thinker is done, and what is left is speech."""
    thinker, talker = await omni.stats(THINKER), await omni.stats(TALKER)
    return thinker["running"] == 0 and talker["running"] == 1 and talker["kv_blocks_used"] > 0


async def at_the_decoder(omni: Served, seen: Seen) -> bool:
    return seen["audio"] >= 1 and await omni.engine.call_stage(CODE2WAV, "executor_holds") == 1


Phase = Callable[[Served, Seen], Awaitable[bool]]
PHASES: dict[str, tuple[Phase, str, int, int]] = {
    "prefill": (in_prefill, "red " * 3500, 8, 8),
    "decode": (in_decode, "hello", LONG, LONG),
    "talker": (at_the_talker, "hello", 4, LONG),
    "code2wav": (at_the_decoder, "hello", 4, LONG),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_an_abort_frees_everything_and_ends_the_stream(
    omni: Served, phase: str, record_property: Callable[[str, object], None]
) -> None:
    reached, prompt, text, codes = PHASES[phase]
    listening = Listening(omni, f"abort-{phase}", prompt, text, codes)
    async with asyncio.timeout(GUARD_S):
        while not await reached(omni, listening.seen):
            assert not listening.task.done(), listening.task.exception()
            await asyncio.sleep(0.002)
    began_s = time.perf_counter()
    assert await omni.engine.abort(listening.request_id)
    freed_s = time.perf_counter()
    assert await omni.held_after_abort() == {}
    await omni.until_free()
    with pytest.raises(RequestCancelledError):
        await listening.task
    ms = {
        "freed": round(1000 * (freed_s - began_s), 1),
        "stream": round(1000 * (listening.ended_s - began_s), 1),
    }
    record_property("abort_ms", ms)
    print(f"abort in {phase}: {ms} ms")


async def test_an_end_that_is_ignored_reaches_no_decoder(omni: Served) -> None:
    """The talker's end is no code. Here it would be drawn at once."""
    wanted = params(4, 40)
    wanted[TALKER] = OmniTokenSamplingParams(
        max_tokens=40, ignore_eos=True, logit_bias={TALKERS_END: 100.0}
    )
    outputs = omni.engine.generate(
        {"messages": said()}, sampling_params_list=wanted, output_modalities=("audio",)
    )
    async with asyncio.timeout(GUARD_S):
        heard = [output async for output in outputs if output.modality == Modality.AUDIO]
    assert heard[-1].finished


async def test_a_client_that_hangs_up_frees_everything(omni: Served) -> None:
    """In the middle of a stream with speech."""
    async with omni.http.stream("POST", CHAT, json=spoken_chat()) as response:
        async for line in response.aiter_lines():
            if sound_in(line):
                break
    await omni.until_free()


def spoken_chat() -> dict[str, Any]:
    text, codes = ({"max_tokens": LONG, "min_tokens": LONG} for _ in range(2))
    return {
        "messages": said(),
        "modalities": ["text", "audio"],
        "stream": True,
        "sampling_params_list": [text, codes, {}],
    }


def spoken_sse() -> dict[str, Any]:
    return {"input": "red cat", "response_format": "pcm", "stream_format": "sse"}


def sound_in(line: str) -> bool:
    return '"audio"' in line and '"data"' in line


async def lines_until_killed(omni: Served, path: str, body: dict[str, Any], stage: int) -> str:
    """The whole stream. The stage's process is killed when the first sound has come."""
    victim, text = omni.pids()[stage], ""
    async with omni.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            text += f"{line}\n"
            if victim and "audio" in line and len(line) > 500:
                os.kill(victim, signal.SIGKILL)
                victim = 0
    assert not victim, f"the stream ended before any sound: {text[-500:]}"
    return text


@pytest.mark.parametrize("stage", [THINKER, TALKER, CODE2WAV])
async def test_a_stage_killed_mid_stream_ends_a_chat_and_comes_back(
    omni: Served, stage: int
) -> None:
    victim = omni.pids()[stage]
    text = await lines_until_killed(omni, CHAT, spoken_chat(), stage)
    await assert_lost(omni, text, stage, victim)


async def test_a_stage_killed_mid_speech_ends_it_and_comes_back(omni: Served) -> None:
    victim = omni.pids()[TALKER]
    text = await lines_until_killed(omni, SPEECH, spoken_sse(), TALKER)
    assert "event: error" in text
    await assert_lost(omni, text, TALKER, victim)


async def assert_lost(omni: Served, text: str, stage: int, victim: int) -> None:
    """The last event says what happened, the next request works, nothing is left of this one."""
    last = events_of(text)[-1]
    assert (last["error"]["type"], last["error"]["code"]) == ("stage_lost", 503), last
    assert "SIGKILL" in last["error"]["message"]
    answer = await omni.http.post(SPEECH, json={**spoken_sse(), "max_new_tokens": 8})
    assert events_of(answer.text)[-1]["type"] == "speech.audio.done", answer.text[-500:]
    assert omni.pids()[stage] != victim
    await omni.until_free()


WARM, MORE = 20, 60
"""Spoken answers until everything that is allocated once has been, and those that must add none."""
GROWTH_MIB = 8.0


async def test_memory_stays_as_it_is(
    omni: Served, record_property: Callable[[str, object], None]
) -> None:
    """Every process's, over short answers to sounds that differ; of caches the bound is known."""
    await speak_often(omni, range(WARM))
    before = omni.rss_mib()
    await speak_often(omni, range(WARM, WARM + MORE))
    after = omni.rss_mib()
    record_property("rss_mib", {"before": before, "after": after})
    print(f"resident MiB before {before}, after {MORE} answers {after}")
    for name, size_mib in after.items():
        assert size_mib - before[name] < GROWTH_MIB, (name, before, after)


async def speak_often(omni: Served, numbers: range) -> None:
    for first in numbers[::4]:
        async with asyncio.timeout(GUARD_S):
            answers = await asyncio.gather(*(speak(omni, first + i) for i in range(4)))
        assert all(answers)
    await omni.until_free()


async def speak(omni: Served, number: int) -> bool:
    heard = base64.b64encode(encode_audio(chirp(0.2 + 0.001 * number), RATE_HZ, "wav")).decode()
    part = {"type": "input_audio", "input_audio": {"data": heard, "format": "wav"}}
    body = {
        "messages": said([{"type": "text", "text": f"hello {number}"}, part]),
        "modalities": ["text", "audio"],
        "max_tokens": 4,
        "sampling_params_list": [{}, {"max_tokens": 12}, {}],
    }
    answer = await omni.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["choices"][0]["message"]["audio"]["data"])
