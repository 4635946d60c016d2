"""Finding markers in text that arrives in pieces."""

from __future__ import annotations


def held_back(text: str, *markers: str) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


def first_of(text: str, *markers: str) -> tuple[int, str] | None:
    """Where the first marker begins, and which it is; the longer one where two begin there."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    places = [entry for entry in found if entry[0] >= 0]
    if not places:
        return None
    start, _, marker = min(places)
    return start, marker


class TrimmedText:
    """Text whose leading white space is dropped, and whose trailing white space waits for what
    follows it."""

    def __init__(self) -> None:
        self._begun = False
        self._space = ""

    def feed(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            if not text:
                return ""
            self._begun = True
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept
