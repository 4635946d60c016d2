"""The `openai` package, unmodified, against a tiny Qwen3-Omni of three processes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omnistage.api.audio_encode import encode_audio
from tests.api.pictures import data_url as picture_url
from tests.api.pictures import picture_file
from tests.api.sounds import RATE_HZ, chirp, data_url, decoded, video_file
from tests.e2e.serving import GUARD_S
from tests.e2e.token_serving import NAME, Served, said, serving
from tests.toy.leaks import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"format": "wav"}}
SHORT: dict[str, Any] = {"seed": 3, "max_new_tokens": 12}
LONG = 2000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def omni() -> AsyncIterator[Served]:
    await asyncio.to_thread(str)  # The package starts a thread of the loop's own, for good.
    with nothing_left():
        async with serving("qwen3-omni") as running:
            yield running


def parts() -> dict[str, dict[str, Any]]:
    heard = base64.b64encode(encode_audio(chirp(0.4), RATE_HZ, "wav")).decode()
    seen = data_url(video_file(frames=8), "video/mp4")
    return {
        "picture": {"type": "image_url", "image_url": {"url": picture_url(picture_file())}},
        "sound": {"type": "input_audio", "input_audio": {"data": heard, "format": "wav"}},
        "video": {"type": "video_url", "video_url": {"url": seen}},
    }


def about(*names: str) -> Any:
    return said([{"type": "text", "text": "hello"}, *(parts()[name] for name in names)])


async def test_speech_arrives_in_pieces_and_is_loud(omni: Served) -> None:
    asked: dict[str, Any] = {"model": NAME, "voice": "aiden", "input": "red cat"}
    speech = omni.client.audio.speech
    async with speech.with_streaming_response.create(
        **asked, response_format="pcm", extra_body=SHORT
    ) as response:
        pieces = [piece async for piece in response.iter_bytes()]
    whole = await speech.create(**asked, response_format="wav", extra_body=SHORT)
    streamed, one = decoded(b"".join(pieces), "pcm"), decoded(whole.content, "wav")
    assert np.sqrt(np.mean(streamed**2)) > 0.01
    np.testing.assert_allclose(streamed, one, atol=2 / 32_767)


@pytest.mark.parametrize("names", [("picture",), ("sound",), ("video",), ("picture", "sound")])
async def test_a_chat_about_what_it_is_shown_speaks(omni: Served, names: tuple[str, ...]) -> None:
    """The stream adds up to the answer in one piece: text, words spoken, sound."""
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": about(*names),
        "max_tokens": 4,
        "seed": 1,
        "modalities": ["text", "audio"],
        "extra_body": {"sampling_params_list": [{}, {"max_tokens": 10}, {}]},
    }
    whole = await omni.client.chat.completions.create(**asked, audio={"format": "pcm16"})
    message = whole.choices[0].message
    assert message.audio is not None
    words, sound = "", b""
    stream = await omni.client.chat.completions.create(
        **asked, audio={"format": "pcm16"}, stream=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            spoken: Any = getattr(choice.delta, "audio", None)  # A model of newer packages.
            spoken = spoken if isinstance(spoken, dict | None) else spoken.model_dump()
            words += (spoken or {}).get("transcript") or ""
            sound += base64.b64decode((spoken or {}).get("data") or "")
    assert words == message.audio.transcript != ""
    np.testing.assert_allclose(
        decoded(sound, "pcm"),
        decoded(base64.b64decode(message.audio.data), "pcm"),
        atol=2 / 32_767,
    )


async def test_a_dozen_at_once_of_which_some_leave(omni: Served) -> None:
    """Speech, chats that see and hear, plain text; each third leaves in the middle."""
    async with asyncio.timeout(GUARD_S):
        counts = await asyncio.gather(*(one_of_many(omni, i) for i in range(12)))
    assert all(counts)
    await omni.until_free()


async def one_of_many(omni: Served, number: int) -> int:
    """How much came before it left, or its end."""
    leaves = number % 3 == 0
    if number % 2:
        speech = omni.client.audio.speech.with_streaming_response
        codes = LONG if leaves else 8
        asked: dict[str, Any] = {"model": NAME, "input": f"cat {number}", "voice": "ethan"}
        more = {"seed": number, "max_new_tokens": codes}
        async with speech.create(**asked, response_format="pcm", extra_body=more) as response:
            count = 0
            async for piece in response.iter_bytes():
                count += len(piece)
                if leaves:
                    break
        return count
    talker = {"max_tokens": LONG, "min_tokens": LONG} if leaves else {"max_tokens": 8}
    stream = await omni.client.chat.completions.create(
        model=NAME,
        messages=about("picture" if number % 4 else "sound"),
        max_tokens=6,
        modalities=["text", "audio"],
        stream=True,
        extra_body={"sampling_params_list": [{}, talker, {}]},
    )
    count = 0
    async for _ in stream:
        count += 1
        if leaves and count > 3:
            break
    await stream.close()
    return count
