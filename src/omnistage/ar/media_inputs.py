"""Pictures, sounds and videos of a request: found in its data, checked, named by content.

What families of models share before a checkpoint's own processor sees anything. Needs no device
and may run in any thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnistage.ar.media_cache import MediaCache
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.payloads import StageData
from omnistage.contracts.tensors import host_tensor

KINDS = ("image", "audio", "video")
SOUND_OF_VIDEO = "_audio"
"""Suffix of the tensor that holds the sound of "video_i"."""
PREPARED_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Of one request. `max_pixels` is height x width of a picture or frame; `max_items` counts each
    kind by itself."""

    max_items: int = 64
    max_pixels: int = 7680 * 4320
    max_audio_s: float = 3600.0
    max_video_frames: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Media:
    """One item. `array` is uint8 (height, width, 3) for an image, float32 (n,) for audio, uint8
    (frames, height, width, 3) for a video; `rate` samples or frames a second, 0 for an image."""

    kind: str
    index: int
    array: np.ndarray
    rate: float = 0.0
    sound: Media | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.index}"

    def digest(self, settings: bytes) -> bytes:
        """Names the content, together with whatever `settings` stands for."""
        found = hashlib.blake2b(settings, digest_size=32)
        self._feed(found)
        return found.digest()

    def _feed(self, found: Any) -> None:
        about = (self.kind, self.array.dtype.str, self.array.shape, self.rate)
        found.update(repr(about).encode())
        found.update(np.ascontiguousarray(self.array).data)
        if self.sound is not None:
            self.sound._feed(found)


def request_media(data: StageData, limits: MediaLimits) -> dict[str, list[Media]]:
    """By kind, in order of index, from the tensors "image_i", "audio_i", "video_i" and
    "video_i_audio" with their rates in the fields. Raises `InvalidRequestError`."""
    found = {kind: list(_of_kind(data, kind)) for kind in KINDS}
    for kind, items in found.items():
        if len(items) > limits.max_items:
            raise InvalidRequestError(
                f"{len(items)} items of kind {kind}; at most {limits.max_items} are taken"
            )
        for item in items:
            _check(item, limits)
    return found


def _of_kind(data: StageData, kind: str) -> Iterator[Media]:
    index = 0
    while f"{kind}_{index}" in data.tensors:
        name = f"{kind}_{index}"
        sound = name + SOUND_OF_VIDEO
        yield Media(
            kind=kind,
            index=index,
            array=_array(data.tensors[name], kind),
            rate=_rate(data.fields, name, kind),
            sound=Media(
                kind="audio",
                index=index,
                array=_array(data.tensors[sound], "audio"),
                rate=_rate(data.fields, sound, "audio"),
            )
            if sound in data.tensors
            else None,
        )
        index += 1


def _array(value: Any, kind: str) -> np.ndarray:
    array = host_tensor(value).numpy()
    if not array.flags.writeable:
        array = array.copy()  # torch, which processors use, warns of what it could write to.
    if kind == "image" and array.ndim == 2:
        return np.repeat(array[..., None], 3, axis=2)
    return array[..., :3] if kind == "image" and array.shape[-1:] == (4,) else array


_RATES = {"audio": ("_rate", 16_000.0), "video": ("_fps", 2.0)}
"""Field's suffix, and what holds without it."""


def _rate(fields: Mapping[str, Any], name: str, kind: str) -> float:
    if kind not in _RATES:
        return 0.0
    suffix, usual = _RATES[kind]
    rate = float(fields.get(name + suffix, usual))
    if not 0 < rate < float("inf"):
        raise InvalidRequestError(f"{name}{suffix} must be a positive number, got {rate}")
    return rate


_SHAPES = {
    "image": (np.uint8, 3, "uint8 (height, width, 3)"),
    "audio": (np.float32, 1, "float32 (samples,)"),
    "video": (np.uint8, 4, "uint8 (frames, height, width, 3)"),
}


def _check(item: Media, limits: MediaLimits) -> None:
    dtype, ndim, words = _SHAPES[item.kind]
    array = item.array
    if array.dtype != dtype or array.ndim != ndim or not array.size:
        raise InvalidRequestError(
            f"{item.name} must be {words} and not empty, got {array.dtype} {array.shape}"
        )
    if item.kind == "audio":
        _within(item, "s of sound", len(array) / item.rate, limits.max_audio_s)
        if not np.isfinite(array).all():
            raise InvalidRequestError(f"{item.name} holds samples that are no finite numbers")
        return
    height, width, channels = array.shape[-3:]
    if channels != 3:
        raise InvalidRequestError(f"{item.name} must have 3 colour channels, got {channels}")
    _within(item, "pixels", height * width, limits.max_pixels)
    if item.kind == "video":
        _within(item, "frames", len(array), limits.max_video_frames)
    if item.sound is not None:
        _check(item.sound, limits)


def _within(item: Media, what: str, value: float, limit: float) -> None:
    if value > limit:
        raise InvalidRequestError(f"{item.name} has {value:g} {what}; at most {limit:g} are taken")


def media_order(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """(kind, index) of each media part of chat messages, in order of appearance."""
    return [
        (str(part["type"]), int(part.get("index", -1)))
        for message in messages
        for part in _parts(message)
        if part.get("type") in KINDS
    ]


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def resampled(media: Media, rate_hz: int) -> np.ndarray:
    """float32 (n,) at `rate_hz`."""
    if media.rate == rate_hz:
        return media.array
    import av

    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(media.array)[None], format="fltp", layout="mono"
    )
    frame.sample_rate = int(media.rate)
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate_hz)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([part.to_ndarray()[0] for part in parts])


class PreparedCache:
    """What processors made of media, by digest, for several threads, bounded in bytes."""

    def __init__(self, max_bytes: int = PREPARED_CACHE_BYTES) -> None:
        self._entries = MediaCache(max_bytes)
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> Any | None:
        with self._lock:
            return self._entries.get(digest)

    def put(self, digest: bytes, result: Any) -> None:
        """See `MediaCache` for what a result may be."""
        with self._lock:
            self._entries.put(digest, result)
