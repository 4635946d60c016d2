"""Sound in chat answers: one file, or the pieces of one."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest

from omnistage.api import audio_render
from omnistage.api.audio_encode import encode_audio
from omnistage.api.audio_render import (
    AudioDeltas,
    AudioMessage,
    ChatAudioFormat,
    file_format,
    samples_of,
)
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InternalError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import OmniRequestOutput
from tests.api.sounds import RATE_HZ, best_correlation, chirp, decoded

FORMATS = get_args(ChatAudioFormat)


@pytest.fixture
def workers() -> Iterator[MediaWorkers]:
    pool = MediaWorkers(threads=2, max_pending=8)
    yield pool
    pool.close()


def audio_event(samples: np.ndarray, **fields: Any) -> OmniRequestOutput:
    return OmniRequestOutput(
        request_id="r",
        modality=Modality.AUDIO,
        partial=True,
        tensors={"audio": samples},
        fields={"sample_rate": RATE_HZ, **fields},
    )


def text_event() -> OmniRequestOutput:
    return OmniRequestOutput(request_id="r", modality=Modality.TEXT, fields={"text": "hi"})


def last_event() -> OmniRequestOutput:
    return OmniRequestOutput(request_id="r", modality=Modality.AUDIO, finished=True)


@pytest.mark.parametrize("audio_format", FORMATS)
async def test_a_message_holds_one_file(
    workers: MediaWorkers, audio_format: ChatAudioFormat
) -> None:
    samples = chirp()
    message = AudioMessage(audio_id="audio-1", audio_format=audio_format)
    assert message.add(text_event()) is False
    for piece in np.array_split(samples, 5):
        assert message.add(audio_event(piece)) is True
    assert message.add(last_event()) is True
    rendered = await message.render(workers, "hello")
    assert (rendered["id"], rendered["transcript"]) == ("audio-1", "hello")
    assert rendered["expires_at"] > time.time()
    data = base64.b64decode(rendered["data"], validate=True)
    assert data == encode_audio(samples, RATE_HZ, file_format(audio_format))
    assert message.seconds == pytest.approx(1.0)


async def test_a_message_without_sound_is_an_error(workers: MediaWorkers) -> None:
    message = AudioMessage(audio_id="audio-1", audio_format="wav")
    message.add(last_event())
    with pytest.raises(InternalError, match="without a sound"):
        await message.render(workers, "hello")


@pytest.mark.parametrize("audio_format", FORMATS)
async def test_pieces_join_to_one_file(
    workers: MediaWorkers, audio_format: ChatAudioFormat
) -> None:
    samples = chirp()
    deltas = AudioDeltas(audio_id="audio-1", audio_format=audio_format)
    assert await deltas.chunk(workers, text_event()) is None
    pieces = np.array_split(samples, 7)
    found = [await deltas.chunk(workers, audio_event(piece)) for piece in pieces]
    assert await deltas.chunk(workers, last_event()) is None
    last = await deltas.finish(workers)
    assert last is not None
    assert last["expires_at"] > time.time()
    sent = [delta for delta in [*found, last] if delta]
    assert {delta["id"] for delta in sent} == {"audio-1"}
    data = b"".join(base64.b64decode(delta.get("data", ""), validate=True) for delta in sent)
    sound = decoded(data, file_format(audio_format))
    assert best_correlation(sound, samples) > 0.999
    assert deltas.transcript("hi") == {"id": "audio-1", "transcript": "hi"}


async def test_pcm16_pieces_leave_at_once_and_whole(workers: MediaWorkers) -> None:
    deltas = AudioDeltas(audio_id="a")
    delta = await deltas.chunk(workers, audio_event(chirp(0.1)))
    assert delta is not None
    assert len(base64.b64decode(delta["data"])) == 2 * int(0.1 * RATE_HZ)


async def test_a_stream_without_sound_has_no_last_piece(workers: MediaWorkers) -> None:
    assert await AudioDeltas(audio_id="a").finish(workers) is None


@pytest.mark.parametrize("rate", [None, 0, -1, "24000", 24_000.0])
def test_sound_without_a_rate_is_an_error(rate: Any) -> None:
    with pytest.raises(InternalError, match="sample rate"):
        samples_of(audio_event(chirp(0.1), sample_rate=rate))


@pytest.mark.invariant("SPEECH-INV-004")
async def test_chats_sound_is_encoded_off_the_event_loop(
    workers: MediaWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    class Recording(audio_render.AudioEncoder):
        def push(self, samples: np.ndarray) -> bytes:
            threads.add(threading.current_thread().name.split("_")[0])
            return super().push(samples)

    def recording(*args: Any) -> bytes:
        threads.add(threading.current_thread().name.split("_")[0])
        return encode_audio(*args)

    monkeypatch.setattr(audio_render, "AudioEncoder", Recording)
    monkeypatch.setattr(audio_render, "encode_audio", recording)
    message = AudioMessage(audio_id="a", audio_format="wav")
    message.add(audio_event(chirp(0.1)))
    await message.render(workers, "")
    await AudioDeltas(audio_id="a").chunk(workers, audio_event(chirp(0.1)))
    assert threads == {"omnistage-media-out"}
