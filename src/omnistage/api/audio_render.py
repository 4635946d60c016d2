"""Sound in a chat's answer: one file in the message, or pieces in the stream, as OpenAI sends it.

What encodes runs in a worker thread; the event loop only hands samples over.
"""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from omnistage.api.audio_encode import AudioEncoder, AudioFormat, encode_audio
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InternalError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import OmniRequestOutput

ChatAudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]

SAMPLES = "audio"
"""The tensor of an audio event: float32 (n,), the continuation of the event before it."""
SAMPLE_RATE = "sample_rate"
"""The field of an audio event with its samples a second."""
_KEPT_S = 24 * 3600
"""OpenAI's answers say until when the server keeps their sound; this one keeps none."""


def samples_of(event: OmniRequestOutput) -> tuple[np.ndarray, int] | None:
    """The samples, float32 (n,), and rate of an audio event; None for any other event, and for one
    that ends the sound without adding to it. Raises `InternalError` for a malformed one."""
    if event.modality is not Modality.AUDIO or SAMPLES not in event.tensors:
        return None
    rate_hz = event.fields.get(SAMPLE_RATE)
    if not isinstance(rate_hz, int) or rate_hz <= 0:
        raise InternalError("the model made sound without a sample rate")
    samples = np.asarray(event.tensors[SAMPLES], dtype=np.float32).reshape(-1)
    return (samples, rate_hz) if len(samples) else None


def file_format(audio_format: ChatAudioFormat) -> AudioFormat:
    return "pcm" if audio_format == "pcm16" else audio_format


def expires_at_unix_s() -> int:
    return int(time.time()) + _KEPT_S


@dataclass(slots=True, kw_only=True)
class AudioMessage:
    """The sound of one choice of an answer in one piece. `add` every event, then `render`."""

    audio_id: str
    audio_format: ChatAudioFormat
    _pieces: list[np.ndarray] = field(default_factory=list)
    _rate_hz: int = 0

    def add(self, event: OmniRequestOutput) -> bool:
        """Whether the event was one of sound."""
        found = samples_of(event)
        if found is not None:
            self._pieces.append(found[0])
            self._rate_hz = found[1]
        return event.modality is Modality.AUDIO

    @property
    def seconds(self) -> float:
        return sum(map(len, self._pieces)) / self._rate_hz if self._rate_hz else 0.0

    async def render(self, workers: MediaWorkers, transcript: str) -> dict[str, Any]:
        """`message.audio`: the file in base64 with the text that it speaks. Raises `InternalError`
        when no sound came."""
        if not self._pieces:
            raise InternalError("the model finished without a sound")
        data = await workers.run(self._encode)
        return {
            "id": self.audio_id,
            "data": data,
            "expires_at": expires_at_unix_s(),
            "transcript": transcript,
        }

    def _encode(self) -> str:
        samples = np.concatenate(self._pieces)
        return _base64(encode_audio(samples, self._rate_hz, file_format(self.audio_format)))


class AudioDeltas:
    """`delta.audio` of one choice of a stream. The pieces' data, decoded and joined, is one file;
    with `pcm16`, which OpenAI's own streams demand, 16-bit samples at 24 kHz."""

    def __init__(self, *, audio_id: str, audio_format: ChatAudioFormat = "pcm16") -> None:
        self._audio_id = audio_id
        self._format = file_format(audio_format)
        self._encoder: AudioEncoder | None = None

    def transcript(self, text: str) -> dict[str, Any]:
        return {"id": self._audio_id, "transcript": text}

    async def chunk(self, workers: MediaWorkers, event: OmniRequestOutput) -> dict[str, Any] | None:
        """What an audio event adds to the file; None where the encoder holds it back for now."""
        found = samples_of(event)
        if found is None:
            return None
        return self._delta(await workers.run(self._push, *found))

    async def finish(self, workers: MediaWorkers) -> dict[str, Any] | None:
        """The last piece, with `expires_at`. None when there was no sound."""
        if self._encoder is None:
            return None
        delta = self._delta(await workers.run(self._encoder.finish)) or {"id": self._audio_id}
        return {**delta, "expires_at": expires_at_unix_s()}

    def _push(self, samples: np.ndarray, rate_hz: int) -> bytes:
        if self._encoder is None:
            self._encoder = AudioEncoder(self._format, rate_hz)
        return self._encoder.push(samples)

    def _delta(self, data: bytes) -> dict[str, Any] | None:
        return {"id": self._audio_id, "data": _base64(data)} if data else None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
