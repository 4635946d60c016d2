"""One call as a JSON object, `{"name": "f", "arguments": {…}}`, read while it is written."""

from __future__ import annotations

import json
from enum import Enum, auto

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _Want(Enum):
    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()


class CallScanner:
    """`feed` takes characters until the object ends; `take_arguments` gives what is known of the
    arguments, as their own JSON text, once the name is known.

    `broken`: the text is no such object. Arguments that are a string hold JSON text themselves.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._want = _Want.OPEN
        self._key = ""
        self._raw = ""
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._ready = ""
        self._streams = False
        self._seen_arguments = False

    def feed(self, text: str) -> int:
        """How many characters were taken: all, unless the object ended or broke or the name is
        known from here on."""
        nameless = self.name is None
        for count, char in enumerate(text):
            self._take(char)
            if self.broken:
                return count
            if self.done or (nameless and self.name is not None):
                return count + 1
        return len(text)

    def take_arguments(self) -> str:
        if self.name is None:
            return ""
        if self.done and not self._seen_arguments:
            self._seen_arguments = True
            self._ready = "{}"
        ready, self._ready = self._ready, ""
        return ready

    def _take(self, char: str) -> None:
        if self._want is _Want.IN_KEY:
            self._in_key(char)
        elif self._want is _Want.IN_VALUE:
            self._in_value(char)
        elif char in _SPACE:
            return
        elif self._want is _Want.VALUE:
            self._begin_value(char)
        else:
            self._punctuation(char)

    def _punctuation(self, char: str) -> None:
        if self._want is _Want.OPEN and char == "{":
            self._want = _Want.KEY
        elif self._want is _Want.KEY and char == '"':
            self._want, self._raw = _Want.IN_KEY, '"'
        elif self._want is _Want.COLON and char == ":":
            self._want = _Want.VALUE
        elif self._want is _Want.COMMA and char == ",":
            self._want = _Want.KEY
        elif self._want in (_Want.COMMA, _Want.KEY) and char == "}":
            self._end()
        else:
            self.broken = True

    def _in_key(self, char: str) -> None:
        self._raw += char
        if self._closes_string(char):
            self._key = str(self._parsed(self._raw))
            self._want = _Want.COLON

    def _closes_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
            return False
        self._escaped = char == "\\"
        return char == '"'

    def _begin_value(self, char: str) -> None:
        self._want = _Want.IN_VALUE
        self._raw, self._depth, self._quoted, self._escaped = "", 0, False, False
        self._streams = self._key in _ARGUMENTS and char == "{" and not self._seen_arguments
        if self._streams:
            self._seen_arguments = True
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        if self._quoted:
            self._add(char)
            self._quoted = not self._closes_string(char)
            if not self._quoted and not self._depth:
                self._end_value()
        elif not self._depth and char in ",}" + _SPACE:
            self._end_value()
            self._take(char)
        else:
            self._add(char)
            self._quoted = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self.broken |= self._depth < 0
            if not self._depth and char in "}]":
                self._end_value()

    def _add(self, char: str) -> None:
        if self._streams:
            self._ready += char
        else:
            self._raw += char

    def _end_value(self) -> None:
        self._want = _Want.COMMA
        if self._streams:
            return
        value = self._parsed(self._raw)
        if self._key == _NAME and self.name is None:
            self.name = value if isinstance(value, str) and value else None
            self.broken |= self.name is None
        elif self._key in _ARGUMENTS and not self._seen_arguments:
            self._seen_arguments = True
            self._ready = value if isinstance(value, str) else self._raw

    def _parsed(self, raw: str) -> object:
        try:
            return json.loads(raw, strict=False)
        except ValueError:
            self.broken = True
            return ""

    def _end(self) -> None:
        self.done = True
        self.broken |= self.name is None
