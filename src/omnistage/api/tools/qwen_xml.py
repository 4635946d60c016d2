"""Calls as Qwen3-Coder writes them: one tag a function, one a parameter.

`<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`; some texts leave the
outer tag away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from omnistage.api.text.markers import first_of
from omnistage.api.tools.base import (
    CallArguments,
    CallStart,
    Content,
    NewId,
    ToolEvent,
    new_call_id,
)
from omnistage.api.tools.outside import OutsideText

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters."""


def typed_value(text: str, schema: Mapping[str, Any]) -> Any:
    """A parameter's text as its schema wants it: strings as they are, the rest read as JSON where
    it is that."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds == ["string"]:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        lowered = text.strip().lower()
        if "boolean" in kinds and lowered in ("true", "false"):
            return lowered == "true"
        return text
    if "string" in kinds and not isinstance(value, (dict, list)) and value is not None:
        return text
    return text if kinds == [None] and isinstance(value, str) else value


class QwenXmlParser:
    """Arguments leave one parameter at a time."""

    def __init__(
        self, schemas: Schemas, *, parallel: bool = True, new_id: NewId = new_call_id
    ) -> None:
        self._schemas = schemas
        self._parallel = parallel
        self._new_id = new_id
        self._pending = ""
        self._outside = OutsideText(OPEN, FUNCTION, keep=(FUNCTION,))
        self._inside = False
        self._tag = ""
        self._function: str | None = None
        self._wrote = False
        self._calls = 0

    def feed(self, text: str) -> list[ToolEvent]:
        self._pending += text
        events: list[ToolEvent] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[ToolEvent]:
        """A call that was cut off keeps the parameters that were whole."""
        if self._inside and self._function is not None:
            return []
        rest = self._unused() + self._pending
        return self._outside.finish(rest, after_calls=self._calls > 0)

    def _advance(self, events: list[ToolEvent]) -> bool:
        if not self._inside:
            content, self._pending, marker = self._outside.split(self._pending)
            if content:
                events.append(Content(content))
            self._inside, self._tag = marker is not None, OPEN if marker == OPEN else ""
            return self._inside
        if self._function is None:
            return self._between(events)
        return self._within(events)

    def _between(self, events: list[ToolEvent]) -> bool:
        """Between the outer tag, functions and the closing tag: anything else ends the block."""
        rest = self._pending.lstrip()
        if rest != CLOSE and any(marker.startswith(rest) for marker in (FUNCTION, CLOSE)):
            return False
        if rest.startswith(FUNCTION):
            name_end = rest.find(">")
            if name_end < 0:
                return False
            self._pending = rest[name_end + 1 :]
            self._begin(rest[len(FUNCTION) : name_end].strip(' "'), events)
            return True
        unused = self._unused()
        if not unused and rest.startswith(CLOSE):
            self._pending = rest[len(CLOSE) :]
        elif unused:
            events.append(Content(unused))
        self._inside = False
        return True

    def _unused(self) -> str:
        """The outer tag of a block without a function, which is no call but content."""
        return self._tag if self._inside else ""

    def _begin(self, name: str, events: list[ToolEvent]) -> None:
        self._function, self._wrote, self._tag = name, False, ""
        self._calls += 1
        if self._reported:
            events.append(CallStart(self._calls - 1, self._new_id(), name))
            events.append(CallArguments(self._calls - 1, "{"))

    @property
    def _reported(self) -> bool:
        return self._parallel or self._calls == 1

    def _within(self, events: list[ToolEvent]) -> bool:
        found = first_of(self._pending, PARAMETER, END_FUNCTION, CLOSE)
        if found is None:
            return False
        start, marker = found
        if marker != PARAMETER:
            self._function = None
            self._add(events, "}")
            self._pending = self._pending[start + (len(marker) if marker == END_FUNCTION else 0) :]
            return True
        name_end = self._pending.find(">", start)
        value_end = self._pending.find(END_PARAMETER, start)
        if name_end < 0 or value_end < 0:
            return False
        name = self._pending[start + len(PARAMETER) : name_end].strip(' "')
        value = self._pending[name_end + 1 : value_end]
        self._pending = self._pending[value_end + len(END_PARAMETER) :]
        self._add(events, self._entry(name, value))
        return True

    def _entry(self, name: str, text: str) -> str:
        text = text.removeprefix("\n").removesuffix("\n")
        schema = self._schemas.get(self._function or "", {}).get("properties", {}).get(name, {})
        value = typed_value(text, schema if isinstance(schema, Mapping) else {})
        lead = ", " if self._wrote else ""
        self._wrote = True
        return f"{lead}{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"

    def _add(self, events: list[ToolEvent], text: str) -> None:
        if self._reported:
            events.append(CallArguments(self._calls - 1, text))
