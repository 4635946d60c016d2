"""The text before, between and after calls."""

from __future__ import annotations

from omnistage.api.text.markers import first_of, held_back
from omnistage.api.tools.base import Content, ToolEvent


class OutsideText:
    """Splits at the markers that begin a call. White space right before one is no content."""

    def __init__(self, *markers: str, keep: tuple[str, ...] = ()) -> None:
        self._markers = markers
        self._keep = keep

    def split(self, text: str) -> tuple[str, str, str | None]:
        """(content, what is left, the marker of the call that begins there). The marker is taken,
        unless it is one of `keep`."""
        found = first_of(text, *self._markers)
        if found is None:
            safe = len(text) - held_back(text, *self._markers)
            kept = text[:safe].rstrip()
            return kept, text[len(kept) :], None
        start, marker = found
        rest = start if marker in self._keep else start + len(marker)
        return text[:start].rstrip(), text[rest:], marker

    @staticmethod
    def finish(text: str, *, after_calls: bool) -> list[ToolEvent]:
        if not text or (after_calls and not text.strip()):
            return []
        return [Content(text)]
