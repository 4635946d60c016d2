"""What the parsers of tool calls have in common."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

NewId = Callable[[], str]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of any call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index`, from 0, begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


ToolEvent = Content | CallStart | CallArguments


class ToolParser(Protocol):
    """Reads a model's text as it comes. The events of `feed` and `finish` together depend on the
    whole text only, not on how it was cut; pieces of one kind that follow each other are one."""

    def feed(self, text: str) -> list[ToolEvent]: ...

    def finish(self) -> list[ToolEvent]: ...


class PlainText:
    """For answers without tools."""

    def feed(self, text: str) -> list[ToolEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ToolEvent]:
        return []
