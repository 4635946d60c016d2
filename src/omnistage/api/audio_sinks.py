"""Where encoded sound goes: plain samples or a container of FFmpeg's, in pieces or whole."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import av
import numpy as np

from omnistage.api.audio_frames import frame_of

_UNKNOWN_BYTES = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a compressed format is made: FFmpeg's names, and the rates its encoder takes."""

    media_type: str
    container: str = ""
    codec: str = ""
    rates_hz: tuple[int, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


class Sink(Protocol):
    def write(self, samples: np.ndarray) -> bytes: ...

    def close(self) -> bytes: ...


def to_pcm16(samples: np.ndarray) -> bytes:
    """Little-endian 16-bit samples."""
    return np.rint(samples.clip(-1.0, 1.0) * 32_767.0).astype("<i2").tobytes()


class PlainSink:
    """16-bit samples, behind a header for wav."""

    def __init__(self, rate_hz: int, *, has_header: bool, seekable: bool) -> None:
        self._has_header = has_header
        self._rate_hz = rate_hz
        self._held = bytearray() if seekable else None
        self._header_due = has_header and not seekable

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


class CompressedSink:
    def __init__(self, packing: Packing, rate_hz: int, *, seekable: bool) -> None:
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
