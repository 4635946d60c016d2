"""Which parser reads the calls of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.api.parser_names import ToolParserName
from omnistage.api.protocol.tool_fields import FunctionDefinition
from omnistage.api.tools.base import NewId, ToolParser, new_call_id
from omnistage.api.tools.forced import parameters_schema
from omnistage.api.tools.hermes import HermesParser
from omnistage.api.tools.qwen_xml import QwenXmlParser


def make_tool_parser(
    name: ToolParserName,
    functions: Sequence[FunctionDefinition],
    *,
    parallel: bool,
    new_id: NewId = new_call_id,
) -> ToolParser:
    """A fresh parser for one answer. `name` is neither "auto" nor "none"."""
    if name == "hermes":
        return HermesParser(parallel=parallel, new_id=new_id)
    assert name in ("qwen3_coder", "qwen3_xml"), name
    schemas = {function.name: parameters_schema(function) for function in functions}
    return QwenXmlParser(schemas, parallel=parallel, new_id=new_id)
