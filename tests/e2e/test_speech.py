"""A tiny Qwen3-Omni, served over HTTP: it speaks, hears and looks. What it says is random."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from omnistage.api.audio_encode import encode_audio
from omnistage.api.settings import ApiSettings
from omnistage.engine.async_omni import AsyncOmni
from tests.api.live_server import live_server
from tests.api.sounds import RATE_HZ, chirp, data_url, decoded, video_file
from tests.checkpoints import checkpoint

SAY: dict[str, Any] = {"input": "Hi.", "response_format": "pcm", "seed": 3, "max_new_tokens": 12}
GUARD_S = 120.0


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, AsyncOmni]]:
    model = str(checkpoint("qwen3-omni"))
    async with (
        AsyncOmni(model, served_model_name="omni") as engine,
        live_server(engine, ApiSettings()) as url,  # type: ignore[arg-type]
    ):
        yield url, engine


@pytest.fixture(scope="module")
def sounds() -> dict[str, str]:
    wav = encode_audio(chirp(0.4), RATE_HZ, "wav")
    return {
        "wav": base64.b64encode(wav).decode(),
        "video": data_url(video_file(frames=12), "video/mp4"),
        "silence": base64.b64encode(
            encode_audio(np.zeros(600 * RATE_HZ, np.float32), RATE_HZ, "flac")
        ).decode(),
    }


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "hello"}, *parts]}]


def heard(data: str, audio_format: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": audio_format}}


@pytest.mark.slow
@pytest.mark.invariant("SPEECH-INV-001")
async def test_a_model_speaks_hears_and_looks(sounds: dict[str, str]) -> None:
    async with (
        served() as (url, engine),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=GUARD_S) as client,
        httpx.AsyncClient(base_url=url, timeout=GUARD_S) as http,
    ):
        voices = (await http.get("/v1/audio/voices")).json()
        assert voices["default"] in voices["voices"]
        first, again, other = [
            decoded((await http.post("/v1/audio/speech", json=body)).content, "pcm")
            for body in (SAY, SAY, {**SAY, "voice": voices["voices"][0]})
        ]
        assert np.sqrt(np.mean(first**2)) > 0.01
        np.testing.assert_allclose(first, again, atol=2 / 32_767)
        assert other.shape != first.shape or np.abs(other - first).max() > 0.01

        events = (await http.post("/v1/audio/speech", json={**SAY, "stream_format": "sse"})).text
        lines = [line for line in events.split("\n") if line.startswith("data: ")]
        *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert len(deltas) > 1
        joined = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
        np.testing.assert_allclose(decoded(joined, "pcm"), first, atol=2 / 32_767)
        assert done["usage"]["input_tokens"] > 0

        video = {"type": "video_url", "video_url": {"url": sounds["video"]}}
        for parts in ([heard(sounds["wav"], "wav")], [video], [heard(sounds["wav"], "wav"), video]):
            answer = await client.chat.completions.create(
                model="omni", messages=user(*parts), max_tokens=4, seed=1
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError, match="max_input_audio_s"):
            await client.chat.completions.create(
                model="omni", messages=user(heard(sounds["silence"], "flac"))
            )
        with pytest.raises(openai.BadRequestError, match="known: "):
            await client.audio.speech.create(model="omni", voice="nobody", input="Hi.")
        exposed = engine.metrics.render()[0].decode()
    for family in ("audio_time_to_first_packet_seconds_count", "generation_tokens_total"):
        [line] = [line for line in exposed.split("\n") if line.startswith(f"omnistage_{family}")]
        assert float(line.rpartition(" ")[2]) >= 4
    assert 'omnistage_kv_cache_usage_ratio{model_name="omni"' in exposed
