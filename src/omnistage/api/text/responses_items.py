"""The items of a response while they are written, and the events that say so."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from omnistage.api.text.choice import Piece, ToolPiece
from omnistage.api.text.logprobs import chat_logprobs

Kind = Literal["reasoning", "message", "function_call"]
Event = dict[str, Any]

_PREFIX: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class ItemWriter:
    """Pieces in, events out; `output` holds the items so far. `top_logprobs` None: none."""

    def __init__(self, top_logprobs: int | None) -> None:
        self.output: list[dict[str, Any]] = []
        self._top_logprobs = top_logprobs
        self._sequence = 0
        self._open: Kind | None = None
        self._logprobs: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def feed(self, piece: Piece, logprobs: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        self._logprobs += logprobs
        if piece.reasoning:
            events += self._reasoning(piece.reasoning)
        if piece.content:
            events += self._text(piece.content)
        for call in piece.calls:
            events += self._call(call)
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """Close what is open. An answer without any item gets an empty message."""
        events = [] if self.output else self._begin("message", self._new_message())
        return [*events, *self._close("completed" if complete else "incomplete")]

    @property
    def text(self) -> str:
        return "".join(
            part["text"]
            for item in self.output
            if item["type"] == "message"
            for part in item["content"]
        )

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.output) - 1}

    def _reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open != "reasoning":
            events += self._begin("reasoning", {"summary": [], "content": []})
            self._item["content"].append({"type": "reasoning_text", "text": ""})
        self._item["content"][0]["text"] += text
        place = self._place()
        return [
            *events,
            self.event("response.reasoning_text.delta", **place, content_index=0, delta=text),
        ]

    def _text(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open != "message":
            events += self._begin("message", self._new_message())
        self._item["content"][0]["text"] += text
        logprobs = self._take_logprobs()
        self._item["content"][0]["logprobs"] += logprobs
        return [
            *events,
            self.event(
                "response.output_text.delta",
                **self._place(),
                content_index=0,
                delta=text,
                logprobs=logprobs,
            ),
        ]

    def _call(self, call: ToolPiece) -> list[Event]:
        events: list[Event] = []
        if call.id is not None:
            start = {"call_id": call.id, "name": call.name, "arguments": ""}
            events += self._begin("function_call", start)
        if not call.arguments:
            return events
        self._item["arguments"] += call.arguments
        return [
            *events,
            self.event(
                "response.function_call_arguments.delta", **self._place(), delta=call.arguments
            ),
        ]

    @staticmethod
    def _new_message() -> dict[str, Any]:
        return {"role": "assistant", "content": []}

    def _begin(self, kind: Kind, fields: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        item_id = f"{_PREFIX[kind]}_{secrets.token_hex(12)}"
        self.output.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._open = kind
        index = len(self.output) - 1
        snapshot = dict(self._item)
        events.append(self.event("response.output_item.added", output_index=index, item=snapshot))
        if kind == "message":
            self._item["content"] = [_empty_text()]
            events.append(
                self.event(
                    "response.content_part.added",
                    **self._place(),
                    content_index=0,
                    part=_empty_text(),
                )
            )
        return events

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        kind, self._open = self._open, None
        item, place = self._item, self._place()
        item["status"] = status
        events: list[Event] = []
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self.event("response.function_call_arguments.done", **place, **done))
        else:
            part = item["content"][0]
            done = {"content_index": 0, "text": part["text"]}
            if kind == "reasoning":
                events.append(self.event("response.reasoning_text.done", **place, **done))
            else:
                rest = self._take_logprobs()
                part["logprobs"] += rest
                events += [
                    self.event(
                        "response.output_text.done", **place, **done, logprobs=part["logprobs"]
                    ),
                    self.event("response.content_part.done", **place, content_index=0, part=part),
                ]
        index = place["output_index"]
        return [*events, self.event("response.output_item.done", output_index=index, item=item)]

    def _take_logprobs(self) -> list[dict[str, Any]]:
        taken, self._logprobs = self._logprobs, []
        if self._top_logprobs is None:
            return []
        content: list[dict[str, Any]] = chat_logprobs(taken, self._top_logprobs)["content"]
        return content


def _empty_text() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
