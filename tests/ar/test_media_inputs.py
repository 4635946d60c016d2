"""Media of a request: found, checked, named by content, resampled, kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from omnistage.ar.media_inputs import (
    Media,
    MediaLimits,
    PreparedCache,
    media_order,
    request_media,
    resampled,
)
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.tensors import host_tensor

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
SOUND = np.linspace(-1, 1, 800, dtype=np.float32)
VIDEO = np.zeros((5, 4, 6, 3), np.uint8)


def data(tensors, **fields):
    return StageData(modality=Modality.TEXT, fields=fields, tensors=tensors)


def test_media_are_found_by_kind_and_index_with_their_rates():
    found = request_media(
        data(
            {"image_0": host_tensor(PICTURE), "image_1": PICTURE, "audio_0": SOUND}
            | {"video_0": VIDEO, "video_0_audio": SOUND},
            audio_0_rate=8000,
            video_0_fps=1.5,
            video_0_audio_rate=16_000,
        ),
        MediaLimits(),
    )
    assert [item.index for item in found["image"]] == [0, 1]
    assert np.array_equal(found["image"][0].array, PICTURE)
    assert found["audio"][0].rate == 8000
    (video,) = found["video"]
    assert (video.rate, video.sound.rate) == (1.5, 16_000)


def test_grey_pictures_and_such_with_alpha_get_three_channels():
    grey, alpha = PICTURE[..., 0], np.concatenate([PICTURE, PICTURE[..., :1]], axis=2)
    found = request_media(data({"image_0": grey, "image_1": alpha}), MediaLimits())["image"]
    assert np.array_equal(found[0].array[..., 2], grey)
    assert np.array_equal(found[1].array, PICTURE)


@pytest.mark.parametrize(
    ("tensors", "fields", "words"),
    [
        ({"image_0": PICTURE.astype(np.float32)}, {}, "uint8 (height, width, 3)"),
        ({"audio_0": SOUND[None]}, {}, "float32 (samples,)"),
        ({"audio_0": SOUND * np.nan}, {}, "no finite numbers"),
        ({"video_0": VIDEO[..., :2]}, {}, "3 colour channels, got 2"),
        ({"video_0": VIDEO[:0]}, {}, "not empty"),
        ({"audio_0": SOUND}, {"audio_0_rate": 0}, "audio_0_rate must be a positive number"),
        ({"audio_0": SOUND}, {"audio_0_rate": 100}, "audio 0 has 8 s of sound; at most 5"),
        ({"image_0": np.zeros((30, 40, 3), np.uint8)}, {}, "image 0 has 1200 pixels; at most 1000"),
        ({"video_0": np.zeros((9, 2, 2, 3), np.uint8)}, {}, "video 0 has 9 frames; at most 8"),
        ({f"image_{i}": PICTURE for i in range(4)}, {}, "4 items of kind image; at most 3"),
    ],
)
def test_what_is_wrong_is_refused_with_the_limit(tensors, fields, words):
    limits = MediaLimits(max_items=3, max_pixels=1000, max_audio_s=5.0, max_video_frames=8)
    with pytest.raises(InvalidRequestError) as caught:
        request_media(data(tensors, **fields), limits)
    assert words in str(caught.value)


@pytest.mark.invariant("QWEN-OMNI-INV-004")
def test_a_digest_names_content_rates_and_settings():
    base = Media(kind="video", index=0, array=VIDEO, rate=2.0)
    spoken = replace(base, sound=Media(kind="audio", index=0, array=SOUND, rate=16_000.0))
    other = VIDEO.copy()
    other[-1, -1, -1, -1] = 1
    digests = [
        base.digest(b"settings"),
        base.digest(b"others"),
        replace(base, rate=1.0).digest(b"settings"),
        replace(base, array=other).digest(b"settings"),
        replace(base, array=VIDEO.reshape(5, 6, 4, 3)).digest(b"settings"),
        spoken.digest(b"settings"),
    ]
    assert len(set(digests)) == len(digests)
    assert replace(base, index=3, array=VIDEO.copy()).digest(b"settings") == digests[0]


def test_the_order_of_media_is_that_of_the_messages():
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [{"type": "audio", "index": 1}, {"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "image", "index": 0}, {"type": "audio", "index": 0}]},
    ]
    assert media_order(messages) == [("audio", 1), ("image", 0), ("audio", 0)]


def test_sound_is_resampled():
    seconds = np.arange(24_000) / 24_000
    tone = np.sin(2 * np.pi * 440 * seconds).astype(np.float32)
    found = resampled(Media(kind="audio", index=0, array=tone, rate=24_000.0), 16_000)
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert abs(len(found) - 16_000) <= 32
    inside = slice(500, 15_000)
    assert np.abs(found[inside] - expected[inside]).max() < 0.02
    assert resampled(Media(kind="audio", index=0, array=tone, rate=24_000.0), 24_000) is tone


def test_the_cache_is_bounded():
    torch = pytest.importorskip("torch")
    cache = PreparedCache(max_bytes=100)
    for name in (b"a", b"b", b"c"):
        cache.put(name, {"pixels": torch.zeros(10)})
    assert cache.get(b"a") is None
    assert cache.get(b"c") is not None
