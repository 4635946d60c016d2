"""The body of `/v1/chat/completions` for models that answer with text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from omnistage.api.audio_render import ChatAudioFormat
from omnistage.api.protocol.base import NO_NUL, ApiModel, ModelName, without_extra_body
from omnistage.api.protocol.chat import MAX_MESSAGES
from omnistage.api.protocol.messages import ShortText, TextMessage
from omnistage.api.protocol.sampling import SamplingKnobs, TokenCount
from omnistage.api.protocol.tool_fields import ResponseFormat, ToolChoice, Tools
from omnistage.contracts.sampling import MAX_LOGPROBS

NOT_OFFERED = frozenset(
    {
        "function_call",
        "functions",
        "moderation",
        "prediction",
        "prompt_cache_retention",
        "verbosity",
        "web_search_options",
    }
)


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class AudioOptions(ApiModel):
    """How spoken answers sound and arrive. Without a `format`: wav in one piece, pcm16 streamed,
    which is all that OpenAI's own streams know."""

    voice: Annotated[str, Field(min_length=1, max_length=256), NO_NUL] | None = None
    format: ChatAudioFormat | None = None


class Labels(ApiModel):
    """Fields of OpenAI's that change nothing here but the caller's own book-keeping."""

    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class TextChatRequest(SamplingKnobs, Labels):
    """`POST /v1/chat/completions`."""

    inapplicable: ClassVar[frozenset[str]] = NOT_OFFERED
    inapplicable_reason: ClassVar[str] = "is not offered by this server"

    messages: Annotated[list[TextMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: ModelName | None = None
    max_completion_tokens: TokenCount | None = None
    modalities: (
        Annotated[list[Literal["text", "audio", "image"]], Field(min_length=1, max_length=3)] | None
    ) = None
    audio: AudioOptions | None = None
    n: Annotated[int, Field(ge=1, le=10_000)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32), NO_NUL] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten_extra_body(cls, data: Any) -> Any:
        return without_extra_body(data)
