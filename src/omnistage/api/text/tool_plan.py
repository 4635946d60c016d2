"""Which tools an answer may or must call, and how its calls are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omnistage.api.parser_names import ToolParserName
from omnistage.api.protocol.tool_fields import (
    FunctionDefinition,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from omnistage.api.text.params import schema_text
from omnistage.api.text.template import TemplateProfile
from omnistage.api.tools.base import PlainText, ToolParser
from omnistage.api.tools.forced import NamedParser, RequiredParser, named_schema, required_schema
from omnistage.api.tools.registry import make_tool_parser
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError
from omnistage.contracts.sampling import StructuredOutput

MakeParser = Callable[[], ToolParser]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """`offered` goes into the chat template; `structured` forces calls. `named`: one function was
    demanded, whose answer ends like any other, as OpenAI has it."""

    make_parser: MakeParser = PlainText
    offered: list[dict[str, Any]] | None = None
    structured: StructuredOutput | None = None
    named: bool = False


def plan_tools(
    tools: list[Tool] | None,
    choice: ToolChoice | None,
    *,
    parallel: bool,
    profile: TemplateProfile,
    parser: ToolParserName,
) -> ToolPlan:
    """Raises `InvalidRequestError` for what the tools or the model cannot do."""
    if not tools:
        if choice not in (None, "none"):
            raise UnsupportedCombinationError("tool_choice needs tools", param="tool_choice")
        return ToolPlan()
    functions = [tool.function for tool in tools]
    _check_names(functions)
    if choice == "none":
        return ToolPlan()
    offered = [tool.model_dump(exclude_none=True) for tool in tools]
    if isinstance(choice, NamedToolChoice):
        function = _find(functions, choice.function.name)
        return ToolPlan(
            make_parser=lambda: NamedParser(function.name),
            offered=offered,
            structured=StructuredOutput(json_schema=named_schema(function)),
            named=True,
        )
    if choice == "required":
        schema = required_schema(functions, parallel=parallel)
        return ToolPlan(
            make_parser=RequiredParser,
            offered=offered,
            structured=StructuredOutput(json_schema=schema),
        )
    name = _readable(profile, parser)
    return ToolPlan(
        make_parser=lambda: make_tool_parser(name, functions, parallel=parallel), offered=offered
    )


def _readable(profile: TemplateProfile, parser: ToolParserName) -> ToolParserName:
    name = profile.tool_parser(parser)
    if name == "none":
        raise UnsupportedCombinationError(
            "this model's calls cannot be read: its chat template shows no known format; use "
            "tool_choice 'required' or a named function (or the operator starts the server with "
            "--tool-call-parser)",
            param="tools",
        )
    return name


def _check_names(functions: list[FunctionDefinition]) -> None:
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"tools: {name!a} is defined twice", param="tools")


def _find(functions: list[FunctionDefinition], name: str) -> FunctionDefinition:
    for function in functions:
        if function.name == name:
            return function
    known = ", ".join(function.name for function in functions)
    raise InvalidRequestError(
        f"tool_choice names {name!a}, which is none of the tools: {known}", param="tool_choice"
    )


def structured_format(wanted: ResponseFormat | None) -> StructuredOutput | None:
    if isinstance(wanted, JsonObjectFormat):
        return StructuredOutput(json_object=True)
    if isinstance(wanted, JsonSchemaFormat):
        return StructuredOutput(json_schema=schema_text(wanted.json_schema.schema_))
    return None


def one_structure(
    forced: StructuredOutput | None, formatted: StructuredOutput | None
) -> StructuredOutput | None:
    if forced is not None and formatted is not None:
        raise UnsupportedCombinationError(
            "a tool call that is demanded has the tool's form; leave response_format out or ask "
            "for tool_choice 'auto'",
            param="response_format",
        )
    return forced or formatted
