"""Bodies of `/v1/chat/completions` for models that make images."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from omnistage.api.protocol.base import (
    NO_NUL,
    ApiModel,
    CleanText,
    DiffusionKnobs,
    ModelName,
    ResponseModel,
    Side,
    Size,
    without_extra_body,
)
from omnistage.api.protocol.images import OutputFormat

MAX_MESSAGES = 1000

_FIELDS_OF_TEXT_MODELS = frozenset(
    {
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "stop",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "verbosity",
        "web_search_options",
    }
)


class TextPart(ApiModel):
    type: Literal["text"]
    text: CleanText


class ImageUrl(ApiModel):
    """`detail` steers models that look at pictures; models that make them ignore it."""

    url: Annotated[str, Field(min_length=1), NO_NUL]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(ApiModel):
    type: Literal["image_url"]
    image_url: ImageUrl


def _part_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"<{kind}>" if kind in ("text", "image_url") else None


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")],
    Discriminator(
        _part_kind,
        custom_error_type="part_kind",
        custom_error_message='a content part needs the type "text" or "image_url"',
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
    | Annotated[list[Part], Field(max_length=256), Tag("<parts>")]
    | Annotated[None, Tag("<null>")],
    Discriminator(
        _content_kind,
        custom_error_type="content_kind",
        custom_error_message="content must be a string or a list of parts",
    ),
]


class Message(ApiModel):
    """One turn. Fields after `name` are those of our own answers, which clients send back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None
    name: Annotated[str, Field(max_length=512), NO_NUL] | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class ChatKnobs(DiffusionKnobs):
    """What steers the picture, at the top level or in `extra_body`."""

    num_outputs_per_prompt: Annotated[int, Field(ge=1, le=10_000)] | None = None
    size: Size | None = None
    height: Side | None = None
    width: Side | None = None
    output_format: OutputFormat = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None


class ChatRequest(ChatKnobs):
    """`POST /v1/chat/completions`. The last user message is the prompt, its pictures the inputs;
    earlier turns are not read."""

    inapplicable: ClassVar[frozenset[str]] = _FIELDS_OF_TEXT_MODELS

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: ModelName | None = None
    modalities: Annotated[
        list[Literal["text", "image", "audio", "video"]] | None, Field(min_length=1)
    ] = None
    n: Annotated[int, Field(ge=1, le=10_000)] | None = None
    stream: bool | None = None
    user: Annotated[str, Field(max_length=512), NO_NUL] | None = None
    extra_body: ChatKnobs | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten_extra_body(cls, data: Any) -> Any:
        return without_extra_body(data)


class ResponseImageUrl(ResponseModel):
    url: str


class ResponsePart(ResponseModel):
    type: Literal["image_url"]
    image_url: ResponseImageUrl


class ResponseMessage(ResponseModel):
    role: Literal["assistant"]
    content: list[ResponsePart]


class ChatChoice(ResponseModel):
    index: int
    message: ResponseMessage
    finish_reason: Literal["stop"]


class ChatResponse(ResponseModel):
    """One choice a picture. `seed` reproduces them."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    seed: int
