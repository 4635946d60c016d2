"""Tools that a model may call, which of them it must, and what form its text must have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from omnistage.api.protocol.base import ApiModel, CleanText, by_json_type
from omnistage.api.protocol.messages import FunctionName
from omnistage.api.protocol.sampling import JsonSchema

MAX_TOOLS = 128


class FunctionDefinition(ApiModel):
    """`parameters` is a JSON schema of an object."""

    name: FunctionName
    description: CleanText | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(ApiModel):
    name: FunctionName


class NamedToolChoice(ApiModel):
    type: Literal["function"] = "function"
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = by_json_type(
    "'none', 'auto', 'required' or an object that names a function",
    text=Literal["none", "auto", "required"],
    entries=NamedToolChoice,
)


class TextFormat(ApiModel):
    type: Literal["text"]


class JsonObjectFormat(ApiModel):
    type: Literal["json_object"]


class SchemaDefinition(ApiModel):
    """`strict` or not, the text conforms."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: CleanText | None = None
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(ApiModel):
    type: Literal["json_schema"]
    json_schema: SchemaDefinition


def format_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("text", "json_object", "json_schema") else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        format_kind,
        custom_error_type="format_kind",
        custom_error_message="a format needs the type 'text', 'json_object' or 'json_schema'",
    ),
]
