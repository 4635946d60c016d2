"""Bodies of `/v1/audio/speech` and `/v1/audio/voices`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from omnistage.api.audio_encode import AudioFormat
from omnistage.api.protocol.base import (
    MAX_SEED,
    NO_NUL,
    ApiModel,
    ModelName,
    ResponseModel,
    without_extra_body,
)
from omnistage.api.time_stretch import MAX_SPEED, MIN_SPEED

VoiceName = Annotated[str, Field(min_length=1, max_length=256), NO_NUL]
SpokenText = Annotated[str, Field(min_length=1, description="What to say."), NO_NUL]


class VoiceId(ApiModel):
    """OpenAI's way to name a voice of one's own."""

    id: VoiceName


class SpeechKnobs(ApiModel):
    """What steers the stage that makes the speech. Left out, the model's own defaults hold."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None


class SpeechRequest(SpeechKnobs):
    """`POST /v1/audio/speech`. Fields from `language` on, and `stream`, are extensions; what a
    model cannot do is refused by name.

    The answer leaves as it is made unless `stream` is false: then it is one file with its length in
    its header.
    """

    input: SpokenText
    model: ModelName | None = None
    voice: VoiceName | VoiceId | None = None
    instructions: Annotated[str, Field(max_length=4096), NO_NUL] | None = None
    response_format: AudioFormat = "mp3"
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED)] = 1.0
    stream_format: Literal["audio", "sse"] = "audio"
    stream: bool | None = None
    language: Annotated[str, Field(min_length=1, max_length=64), NO_NUL] | None = None
    task_type: Annotated[str, Field(min_length=1, max_length=64), NO_NUL] | None = None
    ref_audio: Annotated[str, Field(min_length=1), NO_NUL] | None = None
    ref_text: Annotated[str, Field(min_length=1, max_length=4096), NO_NUL] | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten_extra_body(cls, data: Any) -> Any:
        return without_extra_body(data)

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class SpeechAudioDelta(ResponseModel):
    """A piece of the file, in base64; all pieces joined are the file."""

    type: Literal["speech.audio.delta"]
    audio: str


class SpeechUsage(ResponseModel):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechAudioDone(ResponseModel):
    type: Literal["speech.audio.done"]
    usage: SpeechUsage


class VoiceList(ResponseModel):
    """The names that `voice` may have. `default` speaks where none is named; null where the model
    does not say who that is."""

    voices: list[str]
    default: str | None
