"""Calls that a request forces: the text is JSON by construction, and all of it is calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from omnistage.api.protocol.tool_fields import FunctionDefinition
from omnistage.api.tools.base import CallArguments, CallStart, NewId, ToolEvent, new_call_id
from omnistage.api.tools.json_call import CallScanner
from omnistage.contracts.errors import UnsupportedCombinationError

_ANY_OBJECT = {"type": "object"}
_COMPACT = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
}
"""An option of llguidance's schemas: a call has no white space that a model could get lost in."""


def parameters_schema(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or dict(_ANY_OBJECT)


def named_schema(function: FunctionDefinition) -> str:
    """The text is the arguments of this function."""
    return json.dumps({**parameters_schema(function), **_COMPACT})


def required_schema(functions: Sequence[FunctionDefinition], *, parallel: bool) -> str:
    """The text is a list of calls, at least one, at most one unless `parallel`."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(function, definitions) for function in functions]
    items = {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items, **_COMPACT}
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return json.dumps(schema)


def _call_schema(function: FunctionDefinition, definitions: dict[str, Any]) -> dict[str, Any]:
    """References of a function's own definitions (`#/$defs/…`) count from the root: they move."""
    parameters = dict(parameters_schema(function))
    for name, definition in parameters.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise UnsupportedCombinationError(
                f"two tools define {name!a} in $defs, and differently; rename one", param="tools"
            )
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


class NamedParser:
    """The whole text is the arguments of one call."""

    def __init__(self, name: str, *, new_id: NewId = new_call_id) -> None:
        self._name = name
        self._new_id = new_id
        self._started = False

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        if not self._started:
            text = text.lstrip()
            if not text:
                return []
            self._started = True
            events.append(CallStart(0, self._new_id(), self._name))
        return [*events, CallArguments(0, text)] if text else events

    def finish(self) -> list[ToolEvent]:
        return []


class RequiredParser:
    """The whole text is a JSON list of calls."""

    def __init__(self, *, new_id: NewId = new_call_id) -> None:
        self._new_id = new_id
        self._scanner: CallScanner | None = None
        self._started = False
        self._calls = 0

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while text:
            if self._scanner is None:
                start = text.find("{")
                if start < 0:
                    break
                text = text[start:]
                self._scanner, self._started = CallScanner(), False
            text = self._scan(text, self._scanner, events)
        return events

    def finish(self) -> list[ToolEvent]:
        return []

    def _scan(self, text: str, scanner: CallScanner, events: list[ToolEvent]) -> str:
        taken = scanner.feed(text)
        if scanner.name is not None and not self._started:
            self._started = True
            self._calls += 1
            events.append(CallStart(self._calls - 1, self._new_id(), scanner.name))
        arguments = scanner.take_arguments()
        if arguments:
            events.append(CallArguments(self._calls - 1, arguments))
        if scanner.done or scanner.broken:
            self._scanner = None
        return text[taken:]
