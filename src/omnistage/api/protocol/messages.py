"""The turns of a conversation, as text models take them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from omnistage.api.protocol.base import NO_NUL, ApiModel, CleanText
from omnistage.api.protocol.chat import ImagePart, TextPart

MAX_PARTS = 1024
_PART_KINDS = ("text", "image_url", "input_audio", "audio_url", "video_url", "refusal")
ShortText = Annotated[str, Field(max_length=512), NO_NUL]
Url = Annotated[str, Field(min_length=1), NO_NUL]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class MediaUrl(ApiModel):
    url: Url


class InputAudio(ApiModel):
    """`data` is base64 of a file of that format."""

    data: Annotated[str, Field(min_length=1), NO_NUL]
    format: Annotated[str, Field(min_length=1, max_length=16), NO_NUL]


class InputAudioPart(ApiModel):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPart(ApiModel):
    type: Literal["audio_url"]
    audio_url: MediaUrl


class VideoUrlPart(ApiModel):
    type: Literal["video_url"]
    video_url: MediaUrl


class RefusalPart(ApiModel):
    type: Literal["refusal"]
    refusal: CleanText


def _part_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"<{kind}>" if kind in _PART_KINDS else None


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[InputAudioPart, Tag("<input_audio>")]
    | Annotated[AudioUrlPart, Tag("<audio_url>")]
    | Annotated[VideoUrlPart, Tag("<video_url>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(
        _part_kind,
        custom_error_type="part_kind",
        custom_error_message=f"a content part needs a type: one of {', '.join(_PART_KINDS)}",
    ),
]


def _content_kind(content: Any) -> str | None:
    if content is None:
        return "<null>"
    if isinstance(content, str):
        return "<string>"
    return "<parts>" if isinstance(content, list) else None


Content = Annotated[
    Annotated[CleanText, Tag("<string>")]
    | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("<parts>")]
    | Annotated[None, Tag("<null>")],
    Discriminator(
        _content_kind,
        custom_error_type="content_kind",
        custom_error_message="content must be a string or a list of parts",
    ),
]


class CalledFunction(ApiModel):
    """`arguments` is a JSON object as text."""

    name: FunctionName
    arguments: CleanText


class ToolCall(ApiModel):
    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class EarlierAudio(ApiModel):
    """Speech of an earlier answer, sent back. Nothing is stored: the transcript is what counts."""

    id: ShortText | None = None
    transcript: CleanText | None = None
    data: str | None = None
    expires_at: int | None = None


class TextMessage(ApiModel):
    """One turn. `tool_calls`, `reasoning_content` and `audio` are those of earlier answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=256)] | None = None
    tool_call_id: ShortText | None = None
    reasoning_content: CleanText | None = None
    refusal: CleanText | None = None
    audio: EarlierAudio | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None

    @model_validator(mode="after")
    def _belongs_to_its_role(self) -> TextMessage:
        for name in ("tool_calls", "reasoning_content", "audio"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise _misplaced(name, "assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise _misplaced("tool_call_id", "tool")
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(
                "no_content", "a message of this role needs content", {"field": "content"}
            )
        return self


def _misplaced(name: str, role: str) -> PydanticCustomError:
    return PydanticCustomError(
        "misplaced_field", "belongs to messages of role '{role}'", {"field": name, "role": role}
    )
