"""Sounds from clients: files of many formats to float32 mono."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np

from omnistage.api.av_input import AUDIO_CODECS, DecodeDeadline, first_stream, opened
from omnistage.api.media_bytes import FileSource
from omnistage.api.settings import ApiSettings
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InvalidRequestError

INPUT_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm")
"""What `input_audio.format` may say. The data itself decides how it is read."""
_SLACK_S = 0.01
"""What a codec's last frame and a change of rate may add."""
_LOWEST_RATE_HZ, _HIGHEST_RATE_HZ = 1000, 768_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """`samples` are float32 (n,), one channel."""

    samples: np.ndarray
    rate_hz: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate_hz

    def as_input(self) -> tuple[np.ndarray, int]:
        """What the engine takes under "audio" in `multi_modal_data`."""
        return self.samples, self.rate_hz


def decode_sound(data: bytes, *, rate_hz: int, max_s: float, timeout_s: float) -> Sound:
    """The first audio track at `rate_hz`, its channels mixed into one.

    Reading stops as soon as more than `max_s` seconds have come: what a header declares is not
    believed. Raises `InvalidRequestError`.
    """
    deadline = DecodeDeadline(timeout_s)
    with opened(data, "sound") as container:
        return read_track(container, "sound", rate_hz=rate_hz, max_s=max_s, deadline=deadline)


def read_track(
    container: Any, what: str, *, rate_hz: int, max_s: float, deadline: DecodeDeadline
) -> Sound:
    """The first audio track of an open container."""
    stream = first_stream(container, "audio", AUDIO_CODECS, what)
    resampler = av.AudioResampler(format="fltp", rate=rate_hz)
    pieces: list[np.ndarray] = []
    seconds = 0.0
    for frame in container.decode(stream):
        deadline.check()
        _check_rate(frame.sample_rate)
        seconds += frame.samples / frame.sample_rate
        if seconds > max_s + _SLACK_S:
            raise InvalidRequestError(
                f"the {what} lasts more than {max_s:g} s, this server's limit (max_input_audio_s "
                "for all sounds of a request together)"
            )
        frame.pts = None  # Gaps in broken time stamps would become silence of any length.
        pieces += [_mixed(out) for out in resampler.resample(frame)]
    if pieces:
        pieces += [_mixed(out) for out in resampler.resample(None)]
    return _checked(pieces, rate_hz, what)


def _mixed(frame: av.AudioFrame) -> np.ndarray:
    """The mean of all channels, as audio libraries for Python mix them; FFmpeg's own differs."""
    channels: np.ndarray = frame.to_ndarray()
    return channels[0] if len(channels) == 1 else channels.mean(axis=0)


def _check_rate(rate_hz: int) -> None:
    if not _LOWEST_RATE_HZ <= rate_hz <= _HIGHEST_RATE_HZ:
        raise InvalidRequestError(
            f"the sound has {rate_hz} samples a second; allowed: {_LOWEST_RATE_HZ} to "
            f"{_HIGHEST_RATE_HZ}"
        )


def _checked(pieces: list[np.ndarray], rate_hz: int, what: str) -> Sound:
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if not len(samples):
        raise InvalidRequestError(f"the {what} is empty: it holds not one audio sample")
    if not np.isfinite(samples).all():
        raise InvalidRequestError(f"the {what} holds samples that are no finite numbers")
    return Sound(samples=samples, rate_hz=rate_hz)


def input_audio_url(data: str, audio_format: str, param: str) -> str:
    """OpenAI's `input_audio` part as the data URL that `AudioSource` reads."""
    if audio_format not in INPUT_FORMATS:
        raise InvalidRequestError(
            f"{param}.format: {audio_format!a} is not read; allowed: {', '.join(INPUT_FORMATS)}",
            param=f"{param}.format",
        )
    return f"data:audio/{audio_format};base64,{data}"


class AudioSource:
    """Reads the sounds of a request, within the bounds for one and for all."""

    def __init__(self, settings: ApiSettings, workers: MediaWorkers, files: FileSource) -> None:
        self._settings = settings
        self._workers = workers
        self._files = files

    async def from_urls(self, urls: Sequence[tuple[str, str]]) -> list[Sound]:
        """`urls` are pairs of parameter name and `data:`, `https:` or `file:` URL."""
        settings = self._settings
        limit = ("max_input_audios", settings.max_input_audios)
        seconds_left = settings.max_input_audio_s
        sounds: list[Sound] = []
        for param, data in await self._files.load_all(urls, "sounds", limit):
            try:
                sound = await self._workers.run_bounded(
                    decode_sound,
                    data,
                    rate_hz=settings.input_audio_rate_hz,
                    max_s=seconds_left,
                    timeout_s=settings.media_decode_timeout_s,
                )
            except InvalidRequestError as error:
                error.param = error.param or param
                raise
            seconds_left = max(0.0, seconds_left - sound.seconds)
            sounds.append(sound)
        return sounds
