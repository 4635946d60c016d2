"""Videos from clients, friendly and not."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from omnistage.api import media_video
from omnistage.api.audio_encode import encode_audio
from omnistage.api.media_bytes import FileSource
from omnistage.api.media_fetch import MediaFetcher
from omnistage.api.media_video import (
    Clip,
    VideoLimits,
    VideoSource,
    choose_frames,
    decode_clip,
    scaled_size,
    upright,
)
from omnistage.api.settings import ApiSettings
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InvalidRequestError
from omnistage.engine.media import media_inputs
from tests.api.sounds import RATE_HZ, chirp, data_url, video_file

LIMITS = VideoLimits(
    fps=2.0,
    max_frames=128,
    max_file_frames=1000,
    frame_pixels=10**6,
    max_pixels=10**7,
    timeout_s=30.0,
)
VIDEO = video_file()


@pytest.fixture
def workers() -> Iterator[MediaWorkers]:
    pool = MediaWorkers(threads=2, max_pending=8)
    yield pool
    pool.close()


def source(workers: MediaWorkers, settings: ApiSettings | None = None) -> VideoSource:
    settings = settings or ApiSettings()
    return VideoSource(settings, workers, FileSource(settings, workers, MediaFetcher(settings)))


def levels(clip: Clip) -> list[int]:
    return [int(frame.mean()) for frame in clip.frames]


@pytest.mark.parametrize(
    ("codec", "container"), [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "avi")]
)
def test_two_frames_a_second_from_first_to_last(codec: str, container: str) -> None:
    data = video_file(codec=codec, container=container, sound_s=None)
    clip = decode_clip(data, LIMITS)
    assert (clip.frames.dtype, clip.frames.shape) == (np.uint8, (10, 48, 64, 3))
    assert clip.fps == pytest.approx(2.0, rel=0.03)
    wanted = [5 * i for i in np.linspace(0, 49, 10).round()]
    np.testing.assert_allclose(levels(clip), wanted, atol=6)
    assert clip.sound is None


def test_a_long_video_gives_frames_that_lie_further_apart() -> None:
    clip = decode_clip(VIDEO, replace(LIMITS, max_frames=6))
    assert len(clip.frames) == 6
    assert clip.fps == pytest.approx(6 / 5)
    np.testing.assert_allclose(levels(clip), np.linspace(0, 49, 6).round() * 5, atol=6)


@pytest.mark.parametrize(("frames", "taken"), [(1, 1), (2, 2), (3, 2), (5, 4), (8, 4)])
def test_a_short_video_gives_what_it_has(frames: int, taken: int) -> None:
    clip = decode_clip(video_file(frames=frames, sound_s=None), LIMITS)
    assert len(clip.frames) == taken
    assert clip.fps > 0


def test_choice_is_even_and_within_bounds() -> None:
    for total in (1, 2, 7, 100, 5000):
        indices, fps = choose_frames([i / 25 for i in range(total)], LIMITS)
        assert indices == sorted(set(indices))
        assert len(indices) % 2 == 0 or total == 1
        assert len(indices) <= LIMITS.max_frames
        assert (indices[0], fps > 0) == (0, True)
    still, fps = choose_frames([3.0] * 8, LIMITS)
    assert (len(still), fps) == (8, 2.0)


def test_large_frames_are_made_smaller_in_shape() -> None:
    clip = decode_clip(VIDEO, replace(LIMITS, frame_pixels=800))
    assert clip.frames.shape[1:] == (24, 32, 3)
    np.testing.assert_allclose(levels(clip)[-1], 245, atol=6)
    assert scaled_size(10_000, 1, 100) == (1000, 1)


def test_a_video_filmed_upright_is_shown_upright() -> None:
    lying = np.arange(6, dtype=np.uint8).reshape(2, 3, 1).repeat(3, 2)
    np.testing.assert_array_equal(upright(lying, -90)[..., 0], [[3, 0], [4, 1], [5, 2]])
    np.testing.assert_array_equal(upright(lying, 180)[..., 0], [[5, 4, 3], [2, 1, 0]])
    np.testing.assert_array_equal(upright(lying, 0), lying)


def test_the_sound_comes_on_request() -> None:
    clip = decode_clip(VIDEO, LIMITS, sound_rate_hz=16_000)
    assert clip.sound is not None
    assert clip.sound.seconds == pytest.approx(1.0, abs=0.05)
    assert clip.sound.samples[4000:12_000].mean() == pytest.approx(0.1, abs=0.02)
    with pytest.raises(InvalidRequestError, match="no audio track"):
        decode_clip(video_file(sound_s=None), LIMITS, sound_rate_hz=16_000)
    with pytest.raises(InvalidRequestError, match="max_input_audio_s"):
        decode_clip(VIDEO, LIMITS, sound_rate_hz=16_000, max_sound_s=0.5)


def test_the_engine_takes_what_was_read() -> None:
    clip = decode_clip(VIDEO, LIMITS, sound_rate_hz=16_000)
    tensors, fields = media_inputs(
        "video", [clip.as_input(), decode_clip(VIDEO, LIMITS).as_input()]
    )
    assert set(tensors) == {"video_0", "video_0_audio", "video_1"}
    assert fields["video_0_audio_rate"] == 16_000
    assert clip.sound is not None
    tensors, fields = media_inputs("audio", [clip.sound.as_input()])
    np.testing.assert_array_equal(tensors["audio_0"], clip.sound.samples)
    assert fields == {"audio_0_rate": 16_000}


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


HOSTILE = {
    "nothing": (b"", LIMITS, "no video of a known format"),
    "text": (b"no video at all " * 50, LIMITS, "no video of a known format"),
    "picture": (picture(), LIMITS, "no video of a known format"),
    "sound": (encode_audio(chirp(0.2), RATE_HZ, "mp3"), LIMITS, "no video track"),
    "half of it": (VIDEO[: len(VIDEO) // 2], LIMITS, "no video of a known format"),
    "pixels": (VIDEO, replace(LIMITS, max_pixels=3071), r"64x48.*3071.*max_input_pixels"),
    "frames": (VIDEO, replace(LIMITS, max_file_frames=49), "49 frames.*max_video_file_frames"),
    "time": (VIDEO, replace(LIMITS, timeout_s=1e-9), "media_decode_timeout_s"),
}


@pytest.mark.invariant("MEDIA-INV-001")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_videos_are_refused_with_the_reason(name: str) -> None:
    data, limits, reason = HOSTILE[name]
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        decode_clip(data, limits)
    assert caught.value.status == 400


@pytest.mark.invariant("MEDIA-INV-001")
def test_garbage_inside_a_real_container_is_no_server_error() -> None:
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(40):
        data = bytearray(VIDEO)
        for place in rng.integers(32, len(data), 60):
            data[place] = int(rng.integers(256))
        try:
            clip = decode_clip(bytes(data), LIMITS, sound_rate_hz=16_000)
            assert clip.frames.shape[1:] == (48, 64, 3)
        except InvalidRequestError:
            refused += 1
    assert refused


async def test_settings_rule_and_parameters_are_named(workers: MediaWorkers) -> None:
    url = data_url(VIDEO, "video/mp4")
    settings = ApiSettings(video_fps=1.0, video_frame_pixels=800)
    [clip] = await source(workers, settings).from_urls([("a", url)], with_sound=True)
    assert clip.frames.shape == (4, 24, 32, 3)
    assert clip.sound is not None
    assert await source(workers).from_urls([]) == []
    with pytest.raises(InvalidRequestError, match="max_input_videos") as caught:
        await source(workers, ApiSettings(max_input_videos=1)).from_urls([("a", url), ("b", url)])
    with pytest.raises(InvalidRequestError, match="no video") as caught:
        await source(workers).from_urls([("a", url), ("b", data_url(b"nothing", "video/mp4"))])
    assert caught.value.param == "b"


@pytest.mark.invariant("SPEECH-INV-004")
async def test_videos_are_decoded_off_the_event_loop(
    workers: MediaWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def recording(*args: object, **options: object) -> Clip:
        threads.append(threading.current_thread().name)
        return decode_clip(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(media_video, "decode_clip", recording)
    await source(workers).from_urls([("a", data_url(VIDEO, "video/mp4"))])
    assert [name.split("_")[0] for name in threads] == ["omnistage-media-in"]
