"""From a request for speech to the bytes of its sound, as they are made."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
from fastapi import Request

from omnistage.api.audio_encode import AudioEncoder, AudioFormat
from omnistage.api.audio_render import samples_of
from omnistage.api.context import AppContext
from omnistage.api.event_stream import data_event
from omnistage.api.text.run import TextJob, run_text
from omnistage.api.time_stretch import TimeStretch
from omnistage.api.tts.base import SpeechJob
from omnistage.contracts.errors import InternalError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import OmniRequestOutput


class SpeechFile:
    """Stretches and encodes what a model speaks. Runs in a worker thread, one call at a time."""

    def __init__(self, audio_format: AudioFormat, speed: float, *, whole: bool) -> None:
        self._format = audio_format
        self._speed = speed
        self._whole = whole
        self._stretch: TimeStretch | None = None
        self._encoder: AudioEncoder | None = None

    def push(self, samples: np.ndarray, rate_hz: int) -> bytes:
        if self._encoder is None or self._stretch is None:
            self._stretch = TimeStretch(self._speed, rate_hz)
            self._encoder = AudioEncoder(self._format, rate_hz, seekable=self._whole)
        return self._encoder.push(self._stretch.push(samples))

    def finish(self) -> bytes:
        """Raises `InternalError` when no sound came."""
        if self._encoder is None or self._stretch is None:
            raise InternalError("the model finished without a sound")
        return self._encoder.push(self._stretch.finish()) + self._encoder.finish()


@dataclass(slots=True, kw_only=True)
class SpeechTask:
    """One request under way. `usage` counts the tokens of its text, where the model tells."""

    context: AppContext
    request: Request
    job: SpeechJob
    file: SpeechFile
    usage: dict[str, int] = field(
        default_factory=lambda: {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    )

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The file in pieces, none of them empty. Closing the generator aborts the request.

        Raises `OmniError`; never ends without sound.
        """
        workers = self.context.workers
        job = TextJob(
            prompt=self.job.prompt, params=self.job.params, modalities=self.job.modalities
        )
        async with aclosing(run_text(self.context, self.request, job)) as events:
            async for event in events:
                self._count(event)
                found = samples_of(event)
                if found is not None:
                    data = await workers.run(self.file.push, *found)
                    if data:
                        yield data
        last = await workers.run(self.file.finish)
        if last:
            yield last

    async def events(self) -> AsyncGenerator[str, None]:
        """The same as server-sent events."""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                audio = base64.b64encode(piece).decode("ascii")
                yield _event({"type": "speech.audio.delta", "audio": audio})
        yield _event({"type": "speech.audio.done", "usage": self.usage})

    async def whole(self) -> bytes:
        async with aclosing(self.pieces()) as pieces:
            return b"".join([piece async for piece in pieces])

    def _count(self, event: OmniRequestOutput) -> None:
        if event.modality not in (Modality.TEXT, Modality.TOKENS):
            return
        usage = self.usage
        usage["input_tokens"] = event.fields.get("prompt_tokens", usage["input_tokens"])
        usage["output_tokens"] = event.fields.get("completion_tokens", usage["output_tokens"])
        usage["total_tokens"] = usage["input_tokens"] + usage["output_tokens"]


def _event(body: dict[str, object]) -> str:
    return data_event(json.dumps(body), name=str(body["type"]))
