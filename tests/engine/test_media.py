"""Sounds and videos from Python callers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omnistage.contracts.errors import InvalidRequestError
from omnistage.engine.media import media_inputs

SOUND = np.linspace(-1, 1, 40)
VIDEO = np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3)


@pytest.mark.parametrize(
    ("value", "rates"),
    [
        (SOUND, [16_000]),
        ((SOUND, 24_000), [24_000]),
        ([SOUND, (SOUND, 8000)], [16_000, 8000]),
        ([(SOUND, np.int64(44_100))], [44_100]),
        (SOUND.tolist(), [16_000]),
        (torch.from_numpy(SOUND), [16_000]),
    ],
)
def test_sounds_become_float32_with_their_rates(value: Any, rates: list[int]) -> None:
    tensors, fields = media_inputs("audio", value)
    assert list(tensors) == [f"audio_{i}" for i in range(len(rates))]
    assert [fields[f"audio_{i}_rate"] for i in range(len(rates))] == rates
    for samples in tensors.values():
        assert samples.dtype == np.float32
        np.testing.assert_allclose(samples, SOUND, atol=1e-7)


@pytest.mark.parametrize(
    ("value", "all_fps"),
    [
        (VIDEO, [2.0]),
        ((VIDEO, 4), [4.0]),
        ((VIDEO, {"fps": 1.5}), [1.5]),
        ([VIDEO, (VIDEO, 3.0)], [2.0, 3.0]),
        (list(VIDEO), [2.0]),
        (tuple(VIDEO[:2]), [2.0]),
        ([Image.fromarray(frame) for frame in VIDEO], [2.0]),
        ((list(VIDEO), 5.0), [5.0]),
        ([[Image.fromarray(frame) for frame in VIDEO], VIDEO], [2.0, 2.0]),
    ],
)
def test_videos_become_uint8_with_their_frame_rates(value: Any, all_fps: list[float]) -> None:
    tensors, fields = media_inputs("video", value)
    assert [fields[f"video_{i}_fps"] for i in range(len(all_fps))] == all_fps
    for frames in tensors.values():
        np.testing.assert_array_equal(frames, VIDEO[: len(frames)])
        assert len(frames) >= 2


def test_a_video_may_bring_its_sound() -> None:
    plain = (VIDEO, {"fps": 1.5, "audio": None})
    tensors, fields = media_inputs("video", [plain, (VIDEO, {"audio": (SOUND, 8000)})])
    assert set(tensors) == {"video_0", "video_1", "video_1_audio"}
    assert fields == {"video_0_fps": 1.5, "video_1_fps": 2.0, "video_1_audio_rate": 8000}
    np.testing.assert_allclose(tensors["video_1_audio"], SOUND, atol=1e-7)


@pytest.mark.invariant("ORCH-INV-108")
@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("audio", np.array([0.0, np.nan]), "finite"),
        ("audio", np.array([0.0, np.inf]), "finite"),
        ("audio", np.zeros(0), "empty"),
        ("audio", np.zeros((2, 3)), r"shape \(n,\)"),
        ("audio", np.zeros(3, np.int16), "floating"),
        ("audio", (SOUND, 0), "rate"),
        ("audio", (SOUND, 0.5), "rate"),
        ("audio", "a.wav", "str"),
        ("audio", b"RIFF", "bytes"),
        ("video", VIDEO.astype(np.float32), "uint8"),
        ("video", VIDEO[..., :2], "uint8"),
        ("video", VIDEO[:0], "at least one frame"),
        ("video", VIDEO[0, 0], "uint8"),
        ("video", (VIDEO, -1), "fps"),
        ("video", (VIDEO, float("nan")), "fps"),
        ("video", (VIDEO, {"fps": "two"}), "fps"),
        ("video", [VIDEO[0], VIDEO[0, :2]], "one shape"),
        ("video", (VIDEO, {"rate": 2}), "no 'rate'"),
        ("video", "a.mp4", "str"),
        ("audio", None, "NoneType"),
    ],
)
def test_what_is_no_sound_or_video_is_refused_with_the_reason(
    kind: str, value: Any, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        media_inputs(kind, value)
    assert caught.value.param == kind


def test_the_sound_of_a_video_is_judged_as_any_other() -> None:
    with pytest.raises(InvalidRequestError, match="finite"):
        media_inputs("video", (VIDEO, {"audio": np.array([np.nan])}))
