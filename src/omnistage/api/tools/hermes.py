"""Calls as Qwen and Hermes models write them: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from omnistage.api.text.markers import held_back
from omnistage.api.tools.base import (
    CallArguments,
    CallStart,
    Content,
    NewId,
    ToolEvent,
    new_call_id,
)
from omnistage.api.tools.json_call import CallScanner
from omnistage.api.tools.outside import OutsideText

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """A call whose name never came is no call: its text is content, markers and all."""

    def __init__(self, *, parallel: bool = True, new_id: NewId = new_call_id) -> None:
        self._parallel = parallel
        self._new_id = new_id
        self._pending = ""
        self._outside = OutsideText(OPEN)
        self._scanner: CallScanner | None = None
        self._body = ""
        self._started = False
        self._calls = 0

    def feed(self, text: str) -> list[ToolEvent]:
        self._pending += text
        events: list[ToolEvent] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[ToolEvent]:
        if self._scanner is None:
            return self._outside.finish(self._pending, after_calls=self._calls > 0)
        if self._started:
            return []
        return self._content(OPEN + self._body + self._pending)

    def _advance(self, events: list[ToolEvent]) -> bool:
        """One step; False when more text is needed."""
        if self._scanner is None:
            content, self._pending, marker = self._outside.split(self._pending)
            events += self._content(content)
            if marker is None:
                return False
            self._scanner, self._body, self._started = CallScanner(), "", False
            return True
        if not self._scanner.done and not self._scanner.broken:
            return self._scan(events, self._scanner)
        return self._close(events)

    def _scan(self, events: list[ToolEvent], scanner: CallScanner) -> bool:
        taken = scanner.feed(self._pending)
        self._body += self._pending[:taken]
        self._pending = self._pending[taken:]
        if scanner.name is not None and not self._started and not scanner.broken:
            self._started = True
            self._calls += 1
            if self._reported:
                events.append(CallStart(self._calls - 1, self._new_id(), scanner.name))
        arguments = scanner.take_arguments() if self._started else ""
        if arguments and self._reported:
            events.append(CallArguments(self._calls - 1, arguments))
        return bool(self._pending) or scanner.done or scanner.broken

    @property
    def _reported(self) -> bool:
        return self._parallel or self._calls == 1

    def _close(self, events: list[ToolEvent]) -> bool:
        """Skip to the end of the call; of one that never began nothing is lost."""
        end = self._pending.find(CLOSE)
        if end < 0:
            keep = held_back(self._pending, CLOSE)
            cut = len(self._pending) - keep
            self._body += self._pending[:cut]
            self._pending = self._pending[cut:]
            return False
        self._body += self._pending[:end]
        self._pending = self._pending[end + len(CLOSE) :]
        if not self._started:
            events += self._content(OPEN + self._body + CLOSE)
        self._scanner = None
        return True

    @staticmethod
    def _content(text: str) -> list[ToolEvent]:
        return [Content(text)] if text else []
