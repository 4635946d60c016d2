"""One answer of a text request while it is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omnistage.api.reasoning import ThinkSplitter
from omnistage.api.tools.base import CallArguments, CallStart, Content, ToolEvent, ToolParser


@dataclass(slots=True)
class ToolPiece:
    """A call's beginning (`id` and `name` set) or the next piece of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Piece:
    """What one event adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolPiece] = field(default_factory=list)

    def extend(self, other: Piece) -> None:
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls


class AnswerReader:
    """Splits a text into thought, content and calls. `splitter` None: nothing is a thought."""

    def __init__(
        self, tools: ToolParser, splitter: ThinkSplitter | None, *, keep_reasoning: bool = True
    ) -> None:
        self._tools = tools
        self._splitter = splitter
        self._keep_reasoning = keep_reasoning

    def feed(self, text: str) -> Piece:
        if not text:
            return Piece()
        reasoning, content = self._splitter.feed(text) if self._splitter else ("", text)
        return self._piece(reasoning, self._tools.feed(content) if content else [])

    def finish(self) -> Piece:
        reasoning, content = self._splitter.finish() if self._splitter else ("", "")
        events = self._tools.feed(content) if content else []
        return self._piece(reasoning, [*events, *self._tools.finish()])

    def _piece(self, reasoning: str, events: list[ToolEvent]) -> Piece:
        piece = Piece(reasoning=reasoning if self._keep_reasoning else "")
        for event in events:
            if isinstance(event, Content):
                piece.content += event.text
            elif isinstance(event, CallStart):
                piece.calls.append(ToolPiece(event.index, id=event.id, name=event.name))
            else:
                _add_arguments(piece.calls, event)
        return piece


def _add_arguments(calls: list[ToolPiece], event: CallArguments) -> None:
    if calls and calls[-1].index == event.index:
        calls[-1].arguments += event.text
    else:
        calls.append(ToolPiece(event.index, event.text))


@dataclass(slots=True)
class Choice:
    """An answer so far. `finish_reason` is the text's own, set when it is complete."""

    index: int
    reader: AnswerReader
    reasoning: str = ""
    content: str = ""
    calls: list[ToolPiece] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.reasoning += piece.reasoning
        self.content += piece.content
        for call in piece.calls:
            if call.id is not None:
                self.calls.append(ToolPiece(call.index, call.arguments, call.id, call.name))
            else:
                self.calls[call.index].arguments += call.arguments
