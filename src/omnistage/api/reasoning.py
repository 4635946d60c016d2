"""Splitting what a model thinks from what it says: `<think>…</think>`."""

from __future__ import annotations

from enum import Enum, auto

from omnistage.api.text.markers import TrimmedText, held_back

OPEN, CLOSE = "<think>", "</think>"

Split = tuple[str, str]
"""(reasoning, content)."""


class _State(Enum):
    START = auto()
    THOUGHT = auto()
    GAP = auto()
    CONTENT = auto()


class ThinkSplitter:
    """Feed pieces, get (reasoning, content) of each. The white space around a thought belongs to
    neither. A thought comes first or not at all: later markers are content."""

    def __init__(self, *, begins_inside: bool) -> None:
        self._begins_inside = begins_inside
        self._state = _State.START
        self._pending = ""
        self._thought = TrimmedText()

    def feed(self, text: str) -> Split:
        self._pending += text
        if self._state is _State.START:
            self._start()
        reasoning = self._think() if self._state is _State.THOUGHT else ""
        if self._state is _State.GAP:
            self._pending = self._pending.lstrip()
            if self._pending:
                self._state = _State.CONTENT
        content = self._take() if self._state is _State.CONTENT else ""
        return reasoning, content

    def finish(self) -> Split:
        """What was held back, now that nothing follows."""
        rest = self._take()
        if self._state is _State.THOUGHT or (self._state is _State.START and self._begins_inside):
            return self._thought.feed(rest), ""
        return "", rest

    def _start(self) -> None:
        stripped = self._pending.lstrip()
        if stripped.startswith(OPEN):
            self._pending = stripped[len(OPEN) :]
            self._state = _State.THOUGHT
        elif not OPEN.startswith(stripped):
            self._state = _State.THOUGHT if self._begins_inside else _State.CONTENT

    def _think(self) -> str:
        end = self._pending.find(CLOSE)
        if end >= 0:
            piece = self._take(end)
            self._pending = self._pending[len(CLOSE) :]
            self._state = _State.GAP
        else:
            piece = self._take(len(self._pending) - held_back(self._pending, CLOSE))
        return self._thought.feed(piece)

    def _take(self, count: int | None = None) -> str:
        size = len(self._pending) if count is None else count
        piece, self._pending = self._pending[:size], self._pending[size:]
        return piece
