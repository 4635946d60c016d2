"""Sounds from clients, friendly and not."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omnistage.api import media_audio
from omnistage.api.audio_encode import AudioFormat, encode_audio
from omnistage.api.audio_sinks import wav_header
from omnistage.api.media_audio import AudioSource, Sound, decode_sound, input_audio_url
from omnistage.api.media_bytes import FileSource
from omnistage.api.media_fetch import MediaFetcher
from omnistage.api.settings import ApiSettings
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InvalidRequestError, PayloadTooLargeError
from tests.api.sounds import RATE_HZ, best_correlation, chirp, data_url, float_wav, video_file

INPUT_HZ = 16_000


def read(data: bytes, *, max_s: float = 300.0, timeout_s: float = 30.0) -> Sound:
    return decode_sound(data, rate_hz=INPUT_HZ, max_s=max_s, timeout_s=timeout_s)


@pytest.fixture
def workers() -> Iterator[MediaWorkers]:
    pool = MediaWorkers(threads=2, max_pending=8)
    yield pool
    pool.close()


def source(workers: MediaWorkers, settings: ApiSettings | None = None) -> AudioSource:
    settings = settings or ApiSettings()
    return AudioSource(settings, workers, FileSource(settings, workers, MediaFetcher(settings)))


@pytest.mark.parametrize("audio_format", ["wav", "mp3", "flac", "opus", "aac"])
def test_files_become_mono_float32_at_one_rate(audio_format: AudioFormat) -> None:
    sound = read(encode_audio(chirp(), RATE_HZ, audio_format))
    assert (sound.rate_hz, sound.samples.dtype) == (INPUT_HZ, np.float32)
    assert sound.seconds == pytest.approx(1.0, abs=0.1)
    assert best_correlation(sound.samples, chirp(rate_hz=INPUT_HZ)) > 0.99


def test_samples_at_the_wanted_rate_come_unchanged_and_channels_are_mixed() -> None:
    samples = chirp(0.5, INPUT_HZ)
    np.testing.assert_allclose(read(float_wav(samples)).samples, samples, atol=1e-7)
    stereo = np.stack([samples, np.zeros_like(samples)], 1).reshape(-1)
    two_channels = bytearray(float_wav(stereo))
    two_channels[22:24] = (2).to_bytes(2, "little")
    two_channels[28:34] = (INPUT_HZ * 8).to_bytes(4, "little") + (8).to_bytes(2, "little")
    np.testing.assert_allclose(read(bytes(two_channels)).samples, samples / 2, atol=1e-6)


def test_the_sound_of_a_video_is_read_too() -> None:
    assert read(video_file()).seconds == pytest.approx(1.0, abs=0.05)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n%b\n#EXT-X-ENDLIST\n"
NAN = np.full(100, np.nan, np.float32)
HOSTILE = {
    "nothing": (b"", "no sound of a known format"),
    "zeros": (b"\0" * 5000, "no sound of a known format"),
    "text": (b"hello, this is text", "no sound of a known format"),
    "playlist": (PLAYLIST % b"file:///etc/passwd", "no sound of a known format"),
    "list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", "no sound of a known format"),
    "no samples": (wav_header(16_000, 0), "empty"),
    "not numbers": (float_wav(NAN), "finite"),
    "one infinite": (float_wav(np.array([0, np.inf, 0], np.float32)), "finite"),
    "rate 1": (wav_header(1, None) + b"\0\0" * 99, "1 samples a second"),
    "half a flac": (encode_audio(chirp(), RATE_HZ, "flac")[:9000], "truncated or corrupt"),
    "no audio track": (video_file(sound_s=None), "no audio track"),
}


@pytest.mark.invariant("MEDIA-INV-001")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sounds_are_refused_with_the_reason(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read(data)
    assert caught.value.status == 400


@pytest.mark.invariant("MEDIA-INV-001")
def test_a_header_that_lies_about_its_length_changes_nothing() -> None:
    samples = chirp(0.5, INPUT_HZ)
    data = encode_audio(samples, INPUT_HZ, "wav")
    for declared in (None, 10**9):
        lying = wav_header(INPUT_HZ, declared) + data[44:]
        np.testing.assert_array_equal(read(lying).samples, read(data).samples)


@pytest.mark.invariant("MEDIA-INV-001")
def test_ten_silent_minutes_in_a_small_file_are_over_the_limit() -> None:
    data = encode_audio(np.zeros(600 * RATE_HZ, np.float32), RATE_HZ, "flac")
    assert len(data) < 200_000
    with pytest.raises(InvalidRequestError, match=r"300 s.*max_input_audio_s"):
        read(data, max_s=ApiSettings().max_input_audio_s)


@pytest.mark.invariant("SPEECH-INV-004")
def test_reading_has_a_time_limit() -> None:
    with pytest.raises(InvalidRequestError, match="media_decode_timeout_s"):
        read(encode_audio(chirp(5.0), RATE_HZ, "flac"), timeout_s=1e-9)


@pytest.mark.invariant("MEDIA-INV-002")
async def test_a_playlist_opens_no_file_and_no_address(tmp_path: Path) -> None:
    (tmp_path / "secret.wav").write_bytes(encode_audio(chirp(), RATE_HZ, "wav"))
    reached = asyncio.Event()
    server = await asyncio.start_server(lambda *_: reached.set(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for target in (f"{tmp_path}/secret.wav", f"http://127.0.0.1:{port}/a.wav"):
            for text in (PLAYLIST, b"ffconcat version 1.0\nfile %b\n"):
                with pytest.raises(InvalidRequestError):
                    await asyncio.to_thread(read, text % target.encode())
    assert not reached.is_set()


async def test_data_urls_and_inline_sounds_are_read_in_order(workers: MediaWorkers) -> None:
    wav = encode_audio(chirp(0.5), RATE_HZ, "wav")
    mp3 = base64.b64encode(encode_audio(chirp(1.0), RATE_HZ, "mp3")).decode()
    inline = input_audio_url(mp3, "mp3", "messages[0].content[1].input_audio")
    sounds = await source(workers).from_urls([("a", data_url(wav)), ("b", inline)])
    assert [round(sound.seconds, 2) for sound in sounds] == [0.5, 1.0]
    assert await source(workers).from_urls([]) == []


def test_an_inline_sound_of_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'wma' is not read; allowed: wav") as caught:
        input_audio_url("AAAA", "wma", "messages[0].content[0].input_audio")
    assert caught.value.param == "messages[0].content[0].input_audio.format"


@pytest.mark.invariant("MEDIA-INV-001")
@pytest.mark.parametrize(
    ("settings", "urls", "kind", "reason"),
    [
        ({}, ["data:audio/wav;base64,@@@@"], InvalidRequestError, "no valid base64"),
        ({}, ["data:audio/wav,abc"], InvalidRequestError, "base64"),
        ({}, ["ftp://a.example/a.wav"], InvalidRequestError, "scheme"),
        ({}, ["file:///etc/passwd"], InvalidRequestError, "allowed-local-media-path"),
        ({"max_media_bytes": 100}, [data_url(b"x" * 200)], PayloadTooLargeError, "100 bytes"),
        ({"max_input_audios": 1}, [data_url(b"x")] * 2, InvalidRequestError, "max_input_audios"),
    ],
)
async def test_what_cannot_be_fetched_names_parameter_and_limit(
    workers: MediaWorkers,
    settings: dict[str, int],
    urls: list[str],
    kind: type[InvalidRequestError],
    reason: str,
) -> None:
    reader = source(workers, ApiSettings(**settings))  # type: ignore[arg-type]
    with pytest.raises(kind, match=reason) as caught:
        await reader.from_urls([("messages[0]", url) for url in urls])
    assert caught.value.param == "messages[0]"


@pytest.mark.invariant("MEDIA-INV-001")
async def test_seconds_and_bytes_count_for_all_sounds_together(workers: MediaWorkers) -> None:
    one = data_url(encode_audio(chirp(1.0), RATE_HZ, "wav"))
    urls = [("a", one), ("b", one)]
    assert len(await source(workers, ApiSettings(max_input_audio_s=2.0)).from_urls(urls)) == 2
    with pytest.raises(InvalidRequestError, match="max_input_audio_s") as caught:
        await source(workers, ApiSettings(max_input_audio_s=1.5)).from_urls(urls)
    assert caught.value.param == "b"
    with pytest.raises(PayloadTooLargeError, match="max_body_bytes"):
        await source(workers, ApiSettings(max_body_bytes=60_000)).from_urls(urls)


@pytest.mark.invariant("SPEECH-INV-004")
async def test_sounds_are_decoded_off_the_event_loop(
    workers: MediaWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def recording(*args: object, **options: object) -> Sound:
        threads.append(threading.current_thread().name)
        return decode_sound(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(media_audio, "decode_sound", recording)
    await source(workers).from_urls([("a", data_url(encode_audio(chirp(0.1), RATE_HZ, "wav")))])
    assert [name.split("_")[0] for name in threads] == ["omnistage-media-in"]
