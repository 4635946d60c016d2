"""Items that a response is asked with: messages, calls, their outputs, thoughts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from omnistage.api.protocol.base import ApiModel, CleanText, by_json_type
from omnistage.api.protocol.messages import MAX_PARTS, FunctionName, InputAudio, ShortText, Url

Status = Literal["in_progress", "completed", "incomplete"]
_MESSAGE_PARTS = ("input_text", "output_text", "input_image", "input_audio", "refusal")


class TextPart(ApiModel):
    """`annotations` and `logprobs` are those of earlier answers; they are not read."""

    type: Literal["input_text", "output_text"]
    text: CleanText
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(ApiModel):
    type: Literal["input_image"]
    image_url: Url
    detail: Literal["auto", "low", "high"] | None = None


class InputAudioItem(ApiModel):
    type: Literal["input_audio"]
    input_audio: InputAudio


class Refusal(ApiModel):
    type: Literal["refusal"]
    refusal: CleanText


def _part_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    if kind in ("input_text", "output_text"):
        return "<text>"
    return f"<{kind}>" if kind in _MESSAGE_PARTS else None


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[InputAudioItem, Tag("<input_audio>")]
    | Annotated[Refusal, Tag("<refusal>")],
    Discriminator(
        _part_kind,
        custom_error_type="part_kind",
        custom_error_message=f"a part needs a type: one of {', '.join(_MESSAGE_PARTS)}",
    ),
]
MessageContent = by_json_type(
    "a string or a list of parts",
    text=CleanText,
    items=Annotated[list[Part], Field(max_length=MAX_PARTS)],
)
FunctionOutput = by_json_type(
    "a string or a list of parts",
    text=CleanText,
    items=Annotated[list[TextPart], Field(max_length=MAX_PARTS)],
)


class MessageItem(ApiModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent
    id: ShortText | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(ApiModel):
    type: Literal["function_call"]
    call_id: ShortText
    name: FunctionName
    arguments: CleanText
    id: ShortText | None = None
    status: Status | None = None


class FunctionOutputItem(ApiModel):
    type: Literal["function_call_output"]
    call_id: ShortText
    output: FunctionOutput
    id: ShortText | None = None
    status: Status | None = None


class ReasoningText(ApiModel):
    type: Literal["reasoning_text", "summary_text"]
    text: CleanText


class ReasoningItem(ApiModel):
    """A thought of an earlier answer, sent back."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: None = None
    id: ShortText | None = None
    status: Status | None = None


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(item: Any) -> str | None:
    if isinstance(item, dict):
        kind = item.get("type", "message" if "role" in item else None)
    else:
        kind = getattr(item, "type", None)
    return f"<{kind}>" if kind in _ITEMS else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _item_kind,
        custom_error_type="item_kind",
        custom_error_message=f"an input item needs a type: one of {', '.join(_ITEMS)}",
    ),
]
