"""Samples to audio files, whole or as they are made. Runs in a worker thread."""

from __future__ import annotations

from typing import Literal

import numpy as np

from omnistage.api.audio_frames import Resampler, checked_samples
from omnistage.api.audio_sinks import CompressedSink, Packing, PlainSink, Sink
from omnistage.contracts.errors import InvalidRequestError

AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm"]

PCM_RATE_HZ = 24_000
"""What `pcm` is, always: OpenAI's clients know no other rate."""

_PACKINGS: dict[str, Packing] = {
    "wav": Packing(media_type="audio/wav"),
    "pcm": Packing(media_type="audio/pcm", rates_hz=(PCM_RATE_HZ,)),
    "mp3": Packing(
        media_type="audio/mpeg",
        container="mp3",
        codec="libmp3lame",
        rates_hz=(8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    ),
    "flac": Packing(media_type="audio/flac", container="flac", codec="flac"),
    "opus": Packing(
        media_type="audio/ogg",
        container="ogg",
        codec="libopus",
        rates_hz=(8000, 12_000, 16_000, 24_000, 48_000),
        # A page every 20 ms: the default of a second would hold back the first sound that long.
        options=(("page_duration", "20000"),),
    ),
    "aac": Packing(
        media_type="audio/aac",
        container="adts",
        codec="aac",
        rates_hz=(8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    ),
}
AUDIO_FORMATS: tuple[str, ...] = tuple(_PACKINGS)


def media_type(audio_format: AudioFormat) -> str:
    return _PACKINGS[audio_format].media_type


def encoded_rate_hz(audio_format: AudioFormat, sample_rate: int) -> int:
    """The rate a file of that format gets: the samples' own where it can, or the next above."""
    rates_hz = _PACKINGS[audio_format].rates_hz
    if not rates_hz or sample_rate in rates_hz:
        return sample_rate
    return min((rate for rate in rates_hz if rate > sample_rate), default=rates_hz[-1])


class AudioEncoder:
    """float32 mono samples (n,), in pieces, to a file in pieces. One thread at a time.

    `seekable` writes lengths into the headers at the end: everything comes with `finish` then.
    Otherwise `push` returns what is ready. Samples are changed to the next rate that the format
    knows. Raises `InternalError` for samples that are no numbers.
    """

    def __init__(
        self, audio_format: AudioFormat, sample_rate: int, *, seekable: bool = False
    ) -> None:
        if audio_format not in _PACKINGS:
            raise InvalidRequestError(
                f"audio format {audio_format!a} is not made; allowed: {', '.join(AUDIO_FORMATS)}",
                param="response_format",
            )
        self.rate_hz = encoded_rate_hz(audio_format, sample_rate)
        self._resample = Resampler(sample_rate, self.rate_hz)
        packing = _PACKINGS[audio_format]
        self._sink: Sink
        if packing.container:
            self._sink = CompressedSink(packing, self.rate_hz, seekable=seekable)
        else:
            self._sink = PlainSink(
                self.rate_hz, has_header=audio_format == "wav", seekable=seekable
            )

    def push(self, samples: np.ndarray) -> bytes:
        return self._sink.write(self._resample.push(checked_samples(samples)))

    def finish(self) -> bytes:
        """What was still held back, and the end of the file."""
        return self._sink.write(self._resample.finish()) + self._sink.close()


def encode_audio(samples: np.ndarray, sample_rate: int, audio_format: AudioFormat) -> bytes:
    """A whole file with its length in the header. `samples` are float32 (n,)."""
    encoder = AudioEncoder(audio_format, sample_rate, seekable=True)
    return encoder.push(samples) + encoder.finish()
