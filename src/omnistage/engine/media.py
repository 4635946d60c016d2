"""Sounds and videos of a prompt's `multi_modal_data` as tensors of the first payload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import InvalidRequestError

DEFAULT_RATE_HZ = 16_000
DEFAULT_FPS = 2.0
MEDIA_KINDS = ("audio", "video")
_ABOUT_VIDEOS = ("fps", "audio")


def media_inputs(kind: str, value: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and fields of all items of one kind.

    "audio": float (n,) samples, alone (16 kHz) or as `(samples, rate)`, one or a list of them →
    "audio_i" float32 (n,) and "audio_i_rate" in Hz. "video": uint8 (frames, height, width, 3) or a
    list of frames (arrays or PIL images), alone (2 frames a second) or as `(frames, fps)` or
    `(frames, {"fps": …, "audio": …})`, one or a list of videos → "video_i" and "video_i_fps", and,
    with a sound (as above), "video_i_audio" and "video_i_audio_rate".
    Raises `InvalidRequestError`.
    """
    tensors: dict[str, np.ndarray] = {}
    fields: dict[str, Any] = {}
    items = _sounds(value) if kind == "audio" else _videos(value)
    for index, item in enumerate(items):
        name = f"{kind}_{index}"
        if kind == "audio":
            tensors[name], fields[f"{name}_rate"] = _sound(item)
            continue
        tensors[name], about = _video(item)
        fields[f"{name}_fps"] = about["fps"]
        if about.get("audio") is not None:
            tensors[f"{name}_audio"], fields[f"{name}_audio_rate"] = _sound(about["audio"])
    return tensors, fields


def _sounds(value: Any) -> Sequence[Any]:
    """A tuple that ends with a number is one sound; a list of plain numbers too."""
    if isinstance(value, tuple) and len(value) == 2 and _is_number(value[1]):
        return [value]
    if isinstance(value, list | tuple):
        return [value] if value and all(map(_is_number, value)) else value
    return [value]


def _videos(value: Any) -> Sequence[Any]:
    """A list is several videos, unless it holds single frames."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict | int | float):
        return [value]
    if isinstance(value, list | tuple):
        return [value] if value and all(map(_is_frame, value)) else value
    return [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_frame(value: Any) -> bool:
    return hasattr(value, "convert") or (isinstance(value, np.ndarray) and value.ndim == 3)


def _sound(item: Any) -> tuple[np.ndarray, int]:
    samples, rate_hz = item if _is_pair(item) else (item, DEFAULT_RATE_HZ)
    if not _is_number(rate_hz) or rate_hz != int(rate_hz) or rate_hz <= 0:
        raise InvalidRequestError(
            f"the rate of a sound must be a positive whole number of samples a second, got "
            f"{rate_hz!r}",
            param="audio",
        )
    array = _array(samples, "audio")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.floating):
        raise InvalidRequestError(
            f"a sound must be floating point samples of shape (n,), one channel, got "
            f"{array.dtype} {array.shape}",
            param="audio",
        )
    if not array.size:
        raise InvalidRequestError("a sound is empty; give at least one sample", param="audio")
    if not np.isfinite(array).all():
        raise InvalidRequestError(
            "a sound holds samples that are no finite numbers (NaN or infinite)", param="audio"
        )
    return np.ascontiguousarray(array, dtype=np.float32), int(rate_hz)


def _video(item: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """The frames, and what is said about them: "fps" always, "audio" maybe."""
    frames, given = item if _is_pair(item) else (item, DEFAULT_FPS)
    about = {"fps": DEFAULT_FPS, **given} if isinstance(given, dict) else {"fps": given}
    for key in about:
        if key not in _ABOUT_VIDEOS:
            raise InvalidRequestError(
                f"a video has no {key!r}; {suggestion(str(key), _ABOUT_VIDEOS)}", param="video"
            )
    fps = about["fps"]
    if not _is_number(fps) or not 0 < fps < math.inf:
        raise InvalidRequestError(
            f"fps of a video must be a number greater than 0, got {fps!r}", param="video"
        )
    array = _frames(frames)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or not array.size:
        raise InvalidRequestError(
            f"a video must be uint8 of shape (frames, height, width, 3) with at least one frame, "
            f"got {array.dtype} {array.shape}",
            param="video",
        )
    return np.ascontiguousarray(array), about | {"fps": float(fps)}


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and not _is_frame(item[0])


def _frames(frames: Any) -> np.ndarray:
    if not isinstance(frames, list | tuple):
        return _array(frames, "video")
    arrays = [
        np.asarray(frame.convert("RGB")) if hasattr(frame, "convert") else _array(frame, "video")
        for frame in frames
    ]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise InvalidRequestError(
            f"the frames of a video must have one shape, got {shapes[0]} and {shapes[1]}",
            param="video",
        )
    return np.stack(arrays) if arrays else np.zeros((0, 0, 0, 3), np.uint8)


def _array(value: Any, kind: str) -> np.ndarray:
    """A numpy array, or a list of numbers; a tensor of torch is read through numpy."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        try:
            return np.asarray(value)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{kind} cannot be read as an array: {error}", param=kind
            ) from error
    raise InvalidRequestError(f"{kind} must be an array, not {type(value).__name__}", param=kind)
