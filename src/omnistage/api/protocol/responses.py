"""The body of `/v1/responses`. Nothing is stored: every request brings the whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from omnistage.api.protocol.base import ApiModel, CleanText, ModelName, by_json_type
from omnistage.api.protocol.chat import MAX_MESSAGES
from omnistage.api.protocol.messages import FunctionName, ShortText
from omnistage.api.protocol.response_items import Item
from omnistage.api.protocol.sampling import JsonSchema, SamplingKnobs, TokenCount
from omnistage.api.protocol.tool_fields import (
    MAX_TOOLS,
    JsonObjectFormat,
    TextFormat,
    format_kind,
)
from omnistage.contracts.sampling import MAX_LOGPROBS

Input = by_json_type(
    "a string or a list of items",
    text=CleanText,
    items=Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)],
)


class FunctionTool(ApiModel):
    type: Literal["function"]
    name: FunctionName
    description: CleanText | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class FunctionChoice(ApiModel):
    type: Literal["function"]
    name: FunctionName


ToolChoice = by_json_type(
    "'none', 'auto', 'required' or an object that names a function",
    text=Literal["none", "auto", "required"],
    entries=FunctionChoice,
)


class SchemaFormat(ApiModel):
    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    description: CleanText | None = None
    strict: bool | None = None


Format = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(
        format_kind,
        custom_error_type="format_kind",
        custom_error_message="a format needs the type 'text', 'json_object' or 'json_schema'",
    ),
]


class TextOptions(ApiModel):
    format: Format | None = None


class Reasoning(ApiModel):
    effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    summary: None = None


class StreamOptions(ApiModel):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(SamplingKnobs):
    """`POST /v1/responses`."""

    inapplicable: ClassVar[frozenset[str]] = frozenset(
        {
            "background_options",
            "context_management",
            "conversation",
            "max_tool_calls",
            "moderation",
            "prompt",
            "prompt_cache_options",
            "prompt_cache_retention",
        }
    )
    inapplicable_reason: ClassVar[str] = (
        "is not offered: this server stores nothing; send the whole conversation as input"
    )

    input: Input
    model: ModelName | None = None
    instructions: CleanText | None = None
    max_output_tokens: TokenCount | None = None
    max_tokens: None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=8)] | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: Literal[False] | None = None
    previous_response_id: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _stores_nothing(cls, data: Any) -> Any:
        for name, harmless in (("previous_response_id", (None,)), ("store", (None, False))):
            if isinstance(data, dict) and data.get(name) not in harmless:
                raise PydanticCustomError(
                    "stateless", "{reason}", {"field": name, "reason": cls.inapplicable_reason}
                )
        return data
