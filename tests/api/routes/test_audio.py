"""`/v1/audio/speech` and `/v1/audio/voices`."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from omnistage.api import speech
from omnistage.api.audio_encode import AUDIO_FORMATS, AudioFormat, encode_audio
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import OutOfMemoryError, OverloadedError
from omnistage.contracts.sampling import OmniTokenSamplingParams
from tests.api.conftest import open_client
from tests.api.fake_engine import FakeEngine
from tests.api.fake_speech import MODEL, FakeSpeechEngine, speech_config
from tests.api.live_server import GUARD_S, live_server
from tests.api.sounds import best_correlation, decoded

BODY = {"model": MODEL, "input": "Good morning.", "response_format": "wav"}


async def post(engine: FakeEngine, **fields: Any) -> httpx.Response:
    settings = fields.pop("settings", None)
    async with open_client(engine, settings) as client:
        return await client.post("/v1/audio/speech", json={**BODY, **fields})


def events_of(text: str) -> list[dict[str, Any]]:
    blocks = [block.split("\n") for block in text.split("\n\n") if block]
    for name, data in blocks:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    return [json.loads(data.removeprefix("data: ")) for _, data in blocks]


@pytest.mark.invariant("SPEECH-INV-001")
@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
async def test_every_format_carries_what_was_spoken(audio_format: AudioFormat) -> None:
    engine = FakeSpeechEngine()
    answer = await post(engine, response_format=audio_format)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("audio/")
    assert best_correlation(decoded(answer.content, audio_format), engine.sound) > 0.999


@pytest.mark.invariant("SPEECH-INV-001")
async def test_one_piece_is_the_file_with_its_length_in_the_header() -> None:
    engine = FakeSpeechEngine()
    answer = await post(engine, stream=False)
    assert answer.content == encode_audio(engine.sound, engine.rate_hz, "wav")
    streamed = await post(engine)
    assert streamed.content[44:] == answer.content[44:]
    assert "content-length" not in streamed.headers


@pytest.mark.invariant("SPEECH-INV-001")
async def test_events_join_to_the_file_and_end_with_the_usage() -> None:
    engine = FakeSpeechEngine()
    answer = await post(engine, stream_format="sse")
    *deltas, done = events_of(answer.text)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert len(deltas) == engine.pieces
    joined = b"".join(base64.b64decode(event["audio"], validate=True) for event in deltas)
    assert joined == (await post(engine)).content
    usage = {"input_tokens": 12, "output_tokens": 3, "total_tokens": 15}
    assert done == {"type": "speech.audio.done", "usage": usage}


@pytest.mark.invariant("SPEECH-INV-001")
async def test_the_first_sound_leaves_before_the_last_is_made() -> None:
    engine = FakeSpeechEngine()
    engine.hold.clear()
    async with (
        live_server(engine) as url,
        httpx.AsyncClient(timeout=GUARD_S) as client,
        client.stream("POST", f"{url}/v1/audio/speech", json=BODY) as answer,
    ):
        pieces = answer.aiter_bytes()
        first = await anext(pieces)
        assert not engine.hold.is_set()
        engine.hold.set()
        rest = [piece async for piece in pieces]
    assert len(first) == 44 + 2 * len(engine.sound) // engine.pieces
    assert len(b"".join([first, *rest])) == 44 + 2 * len(engine.sound)


async def test_speed_shortens_the_sound() -> None:
    engine = FakeSpeechEngine()
    fast = decoded((await post(engine, speed=2.0, stream=False)).content, "wav")
    assert len(fast) == pytest.approx(len(engine.sound) / 2, rel=0.06)


async def test_voice_seed_and_knobs_reach_the_stage_that_speaks() -> None:
    engine = FakeSpeechEngine()
    fields = {"voice": "ethan", "seed": 5, "temperature": 0.7, "top_p": 0.5, "top_k": 9}
    await post(engine, **fields, max_new_tokens=99, instructions="Whisper.", language="German")
    thinker, talker, codec = engine.params[0]
    assert isinstance(talker, OmniTokenSamplingParams)
    assert talker.extra_args == {"voice": "Ethan"}
    assert (talker.temperature, talker.top_p, talker.top_k, talker.max_tokens) == (0.7, 0.5, 9, 99)
    assert isinstance(thinker, OmniTokenSamplingParams)
    assert (thinker.temperature, thinker.seed, talker.seed) == (0.0, 5, 5)
    assert thinker.max_tokens is not None
    assert codec is not talker
    system, user = engine.prompts[0]["messages"]
    assert user == {"role": "user", "content": "Good morning."}
    assert "Whisper." in system["content"]
    assert "German" in system["content"]
    assert engine.modalities == [["text", "audio"]]


async def test_a_voice_may_be_an_object_and_the_default_is_the_first() -> None:
    engine = FakeSpeechEngine()
    assert (await post(engine, voice={"id": "Ethan"})).status_code == 200
    assert (await post(engine)).status_code == 200
    assert [params[1].extra_args["voice"] for params in engine.params] == ["Ethan", "Chelsie"]


@pytest.mark.invariant("SPEECH-INV-002")
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"voice": "alloy"}, "voice", "known: Chelsie, Ethan"),
        ({"ref_audio": "data:audio/wav;base64,AAAA"}, "ref_audio", "clones no voices"),
        ({"ref_text": "hello"}, "ref_text", "clones no voices"),
        ({"task_type": "VoiceDesign"}, "task_type", "CustomVoice"),
        ({"input": ""}, "input", "at least 1"),
        ({"input": " \n"}, "input", "nothing to say"),
        ({"input": "x" * 4097}, "input", "max_speech_chars"),
        ({"input": "a\x00b"}, "input", "NUL"),
        ({"response_format": "wma"}, "response_format", "'wav', 'mp3'"),
        ({"speed": 0.1}, "speed", "0.25"),
        ({"speed": 5}, "speed", "less than or equal to 4"),
        ({"stream_format": "ogg"}, "stream_format", "'sse'"),
        ({"stream": False, "stream_format": "sse"}, "stream", "one piece"),
        ({"temperature": -1}, "temperature", "greater"),
        ({"pitch": 1}, "pitch", "unknown field"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    fields: dict[str, Any], param: str, reason: str
) -> None:
    engine = FakeSpeechEngine()
    answer = await post(engine, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
    assert engine.prompts == []


async def test_a_nan_temperature_is_refused() -> None:
    async with open_client(FakeSpeechEngine()) as client:
        answer = await client.post(
            "/v1/audio/speech",
            content=json.dumps({**BODY, "temperature": float("nan")}),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 400


async def test_the_limit_on_text_is_a_setting() -> None:
    answer = await post(FakeSpeechEngine(), settings=ApiSettings(max_speech_chars=5))
    assert "limit of 5" in answer.json()["error"]["message"]


@pytest.mark.invariant("SPEECH-INV-002")
async def test_a_model_that_does_not_speak_says_so() -> None:
    for engine in (FakeEngine(), FakeSpeechEngine(config=speech_config(model_type="other"))):
        async with open_client(engine) as client:
            answers = [
                await client.post("/v1/audio/speech", json={"input": "Good morning."}),
                await client.get("/v1/audio/voices"),
            ]
        for answer in answers:
            assert answer.status_code == 400
            assert "does not speak" in answer.json()["error"]["message"]


async def test_a_model_without_named_voices_takes_none() -> None:
    engine = FakeSpeechEngine(config=speech_config(voices=()))
    assert (await post(engine)).status_code == 200
    assert engine.params[0][1].extra_args == {}
    refused = await post(engine, voice="Ethan")
    assert "leave voice out" in refused.json()["error"]["message"]
    async with open_client(engine) as client:
        listed = (await client.get("/v1/audio/voices")).json()
    assert listed == {"voices": [], "default": None}


async def test_voices_are_the_checkpoints() -> None:
    async with open_client(FakeSpeechEngine()) as client:
        answer = await client.get("/v1/audio/voices")
        head = await client.head("/v1/audio/voices")
    assert answer.json() == {"voices": ["Chelsie", "Ethan"], "default": "Chelsie"}
    assert head.status_code == 200


@pytest.mark.invariant("SPEECH-INV-003")
async def test_a_failure_before_the_first_sound_has_its_status() -> None:
    for error, status in ((OverloadedError("full"), 429), (OutOfMemoryError("too big"), 503)):
        for stream_format in ("audio", "sse"):
            engine = FakeSpeechEngine(error=error)
            answer = await post(engine, stream_format=stream_format)
            assert answer.status_code == status


@pytest.mark.invariant("SPEECH-INV-003")
async def test_a_late_failure_cuts_the_sound_short_for_all_to_see() -> None:
    engine = FakeSpeechEngine(error=OutOfMemoryError("too big"))
    engine.error_after_pieces = 3
    async with live_server(engine) as url, httpx.AsyncClient(timeout=GUARD_S) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{url}/v1/audio/speech", json=BODY)
        text = (
            await client.post(f"{url}/v1/audio/speech", json={**BODY, "stream_format": "sse"})
        ).text
    *deltas, last = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    assert len(deltas) == 3
    assert (last["type"], last["error"]["type"]) == ("error", "out_of_memory")


@pytest.mark.invariant("SPEECH-INV-003")
@pytest.mark.parametrize("samples", [np.zeros(0, np.float32), np.full(100, np.nan, np.float32)])
async def test_sound_that_is_none_is_an_error_and_no_silence(samples: np.ndarray) -> None:
    engine = FakeSpeechEngine()
    engine.sound, engine.pieces = samples, 1
    answer = await post(engine)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "internal_error"


@pytest.mark.invariant("SPEECH-INV-003")
async def test_a_hang_up_ends_the_request() -> None:
    engine = FakeSpeechEngine()
    engine.hold.clear()
    async with live_server(engine) as url, httpx.AsyncClient(timeout=GUARD_S) as client:
        async with client.stream("POST", f"{url}/v1/audio/speech", json=BODY) as answer:
            await anext(answer.aiter_bytes())
        async with asyncio.timeout(GUARD_S):
            await engine.aborted.wait()


@pytest.mark.invariant("SPEECH-INV-004")
async def test_sound_is_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    class Recording(speech.AudioEncoder):
        def push(self, samples: np.ndarray) -> bytes:
            threads.add(threading.current_thread().name)
            return super().push(samples)

    monkeypatch.setattr(speech, "AudioEncoder", Recording)
    await post(FakeSpeechEngine())
    assert threads
    assert all(name.startswith("omnistage-media-out") for name in threads)


@pytest.mark.invariant("ENTRY-INV-300")
async def test_the_openai_package_speaks_whole_and_streamed() -> None:
    engine = FakeSpeechEngine()
    async with (
        live_server(engine, ApiSettings(api_keys=("key",))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        whole = await client.audio.speech.create(
            model=MODEL, voice="Ethan", input="Good morning.", response_format="flac", speed=1.0
        )
        async with client.audio.speech.with_streaming_response.create(
            model=MODEL,
            voice="Chelsie",
            input="Good morning.",
            response_format="pcm",
            instructions="Cheerfully.",
            extra_body={"seed": 3, "language": "English"},
        ) as answer:
            assert answer.headers["content-type"] == "audio/pcm"
            streamed = b"".join([piece async for piece in answer.iter_bytes(4096)])
        with pytest.raises(openai.BadRequestError, match="Chelsie, Ethan"):
            await client.audio.speech.create(model=MODEL, voice="alloy", input="Good morning.")
    np.testing.assert_allclose(decoded(whole.content, "flac"), engine.sound, atol=1e-4)
    np.testing.assert_allclose(decoded(streamed, "pcm"), engine.sound, atol=1e-4)
