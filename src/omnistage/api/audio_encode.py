"""Samples to audio files, whole or as they are made. Runs in a worker thread."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import av
import numpy as np
from av.filter import Graph

from omnistage.contracts.errors import InternalError, InvalidRequestError

AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm"]

PCM_RATE_HZ = 24_000
"""What `pcm` is, always: OpenAI's clients know no other rate."""
MIN_SPEED, MAX_SPEED = 0.25, 4.0

_UNKNOWN_BYTES = 0xFFFF_FFFF
_ATEMPO_RANGE = (0.5, 2.0)
"""Beyond 2 the filter skips samples instead of blending them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """How a compressed format is made: FFmpeg's names, and the rates its encoder takes."""

    media_type: str
    container: str = ""
    codec: str = ""
    rates_hz: tuple[int, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


_PACKINGS: dict[str, _Packing] = {
    "wav": _Packing(media_type="audio/wav"),
    "pcm": _Packing(media_type="audio/pcm", rates_hz=(PCM_RATE_HZ,)),
    "mp3": _Packing(
        media_type="audio/mpeg",
        container="mp3",
        codec="libmp3lame",
        rates_hz=(8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    ),
    "flac": _Packing(media_type="audio/flac", container="flac", codec="flac"),
    "opus": _Packing(
        media_type="audio/ogg",
        container="ogg",
        codec="libopus",
        rates_hz=(8000, 12_000, 16_000, 24_000, 48_000),
        # A page every 20 ms: the default of a second would hold back the first sound that long.
        options=(("page_duration", "20000"),),
    ),
    "aac": _Packing(
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


def checked_samples(samples: np.ndarray) -> np.ndarray:
    """float32 (n,) within [-1, 1]. Raises `InternalError` for samples that are no numbers."""
    samples = np.ascontiguousarray(samples, dtype=np.float32).reshape(-1)
    if not np.isfinite(samples).all():
        raise InternalError(
            "the model made sound that holds no numbers; ask again or with other parameters"
        )
    return samples.clip(-1.0, 1.0)


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
        self._input_rate_hz = sample_rate
        self._pushed = 0
        self._resample = _Resampler(sample_rate, self.rate_hz)
        packing = _PACKINGS[audio_format]
        self._sink: _Sink
        if packing.container:
            self._sink = _CompressedSink(packing, self.rate_hz, seekable=seekable)
        else:
            self._sink = _PlainSink(audio_format, self.rate_hz, seekable=seekable)

    @property
    def pushed_s(self) -> float:
        return self._pushed / self._input_rate_hz

    def push(self, samples: np.ndarray) -> bytes:
        samples = checked_samples(samples)
        self._pushed += len(samples)
        return self._sink.write(self._resample.push(samples))

    def finish(self) -> bytes:
        """What was still held back, and the end of the file."""
        return self._sink.write(self._resample.finish()) + self._sink.close()


def encode_audio(samples: np.ndarray, sample_rate: int, audio_format: AudioFormat) -> bytes:
    """A whole file with its length in the header. `samples` are float32 (n,)."""
    encoder = AudioEncoder(audio_format, sample_rate, seekable=True)
    return encoder.push(samples) + encoder.finish()


def frame_of(samples: np.ndarray, sample_rate: int, position: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate = sample_rate
    frame.pts = position
    return frame


def _joined(frames: list[av.AudioFrame]) -> np.ndarray:
    pieces = [frame.to_ndarray().reshape(-1) for frame in frames if frame.samples]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


class _Resampler:
    """Carries its state over the pieces: no seams."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._from_hz = from_hz
        self._position = 0
        self._inner = None
        if from_hz != to_hz:
            self._inner = av.AudioResampler(format="fltp", layout="mono", rate=to_hz)

    def push(self, samples: np.ndarray) -> np.ndarray:
        if self._inner is None or not len(samples):
            return samples
        frame = frame_of(samples, self._from_hz, self._position)
        self._position += len(samples)
        return _joined(self._inner.resample(frame))

    def finish(self) -> np.ndarray:
        if self._inner is None or not self._position:
            return np.zeros(0, np.float32)
        return _joined(self._inner.resample(None))


class _Sink(Protocol):
    def write(self, samples: np.ndarray) -> bytes: ...

    def close(self) -> bytes: ...


def to_pcm16(samples: np.ndarray) -> bytes:
    """Little-endian 16-bit samples."""
    return np.rint(samples.clip(-1.0, 1.0) * 32_767.0).astype("<i2").tobytes()


class _PlainSink:
    """16-bit samples, behind a header for wav."""

    def __init__(self, audio_format: AudioFormat, rate_hz: int, *, seekable: bool) -> None:
        self._has_header = audio_format == "wav"
        self._rate_hz = rate_hz
        self._held = bytearray() if seekable else None
        self._header_due = self._has_header and not seekable

    def write(self, samples: np.ndarray) -> bytes:
        data = to_pcm16(samples)
        if self._held is not None:
            self._held += data
            return b""
        return self._due_header() + data

    def close(self) -> bytes:
        if self._held is None:
            return self._due_header()
        header = wav_header(self._rate_hz, len(self._held)) if self._has_header else b""
        return header + bytes(self._held)

    def _due_header(self) -> bytes:
        due, self._header_due = self._header_due, False
        return wav_header(self._rate_hz, None) if due else b""


def wav_header(rate_hz: int, data_bytes: int | None) -> bytes:
    """44 bytes for 16-bit mono; None: a stream whose length nobody knows yet."""
    data = _UNKNOWN_BYTES if data_bytes is None else data_bytes
    riff = _UNKNOWN_BYTES if data_bytes is None else data_bytes + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate_hz, rate_hz * 2, 2, 16, b"data", data),
    )


class _Pipe:
    """A file that only takes: nothing can seek in it."""

    def __init__(self) -> None:
        self._held = bytearray()

    def write(self, data: bytes) -> int:
        self._held += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._held)
        self._held.clear()
        return taken


class _CompressedSink:
    def __init__(self, packing: _Packing, rate_hz: int, *, seekable: bool) -> None:
        self._file: io.BytesIO | _Pipe = io.BytesIO() if seekable else _Pipe()
        self._rate_hz = rate_hz
        self._position = 0
        # bitexact: no random stream numbers, no version of the library in the file.
        options = {"fflags": "+bitexact", "flush_packets": "1", **dict(packing.options)}
        self._container = av.open(self._file, "w", format=packing.container, options=options)
        self._stream: Any = self._container.add_stream(packing.codec, rate=rate_hz)
        self._stream.layout = "mono"

    def write(self, samples: np.ndarray) -> bytes:
        if len(samples):
            frame = frame_of(samples, self._rate_hz, self._position)
            self._position += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._ready()

    def close(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.getvalue() if isinstance(self._file, io.BytesIO) else self._ready()

    def _ready(self) -> bytes:
        return self._file.take() if isinstance(self._file, _Pipe) else b""


class TimeStretch:
    """Faster or slower without a change of pitch: `speed` from 0.25 to 4, 1 leaves all as it is.

    float32 mono (n,) in pieces; the pieces that come out need not be as many or as long.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequestError(
                f"speed: {speed} is out of range; allowed: {MIN_SPEED} to {MAX_SPEED}",
                param="speed",
            )
        self._rate_hz = sample_rate
        self._position = 0
        self._graph = None if speed == 1.0 else _atempo_graph(speed, sample_rate)

    def push(self, samples: np.ndarray) -> np.ndarray:
        if self._graph is None or not len(samples):
            return samples
        self._graph.push(frame_of(checked_samples(samples), self._rate_hz, self._position))
        self._position += len(samples)
        return self._drain(self._graph)

    def finish(self) -> np.ndarray:
        if self._graph is None or not self._position:
            return np.zeros(0, np.float32)
        self._graph.push(None)
        return self._drain(self._graph)

    @staticmethod
    def _drain(graph: Graph) -> np.ndarray:
        frames: list[Any] = []
        while True:
            try:
                frames.append(graph.pull())
            except (av.BlockingIOError, av.EOFError):
                return _joined(frames)


def _atempo_graph(speed: float, sample_rate: int) -> Graph:
    low, high = _ATEMPO_RANGE
    factors = []
    while speed > high or speed < low:
        factors.append(high if speed > high else low)
        speed /= factors[-1]
    graph = Graph()
    last = graph.add_abuffer(sample_rate=sample_rate, format="fltp", layout="mono")
    for factor in (*factors, speed):
        stage = graph.add("atempo", f"{factor:.6f}")
        last.link_to(stage)
        last = stage
    last.link_to(graph.add("abuffersink"))
    graph.configure()
    return graph
