"""Messages of a caller in Python: media may stand in their parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from omnistage.contracts.errors import InvalidRequestError

_KINDS = ("image", "audio", "video")


def is_conversation(value: Any) -> bool:
    """Whether this is a list of messages: dictionaries with a role."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def read_conversation(
    messages: Any, media: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Plain messages whose media parts are `{"type": kind, "index": i}`, and all media by kind.

    A part `{"type": "image", "image": item}` brings its item, `{"type": "image"}` takes the next
    one of `media`, one with an "index" names it. Raises `InvalidRequestError`.
    """
    if not is_conversation(messages):
        raise InvalidRequestError(
            "messages must be a list of dictionaries with role and content, at least one",
            param="messages",
        )
    items = {kind: _as_list(value) for kind, value in media.items()}
    reader = _Reader(items)
    plain = [reader.message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return plain, items


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


class _Reader:
    def __init__(self, items: dict[str, list[Any]]) -> None:
        self._items = items
        self._next: Counter[str] = Counter()

    def message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str) or content is None:
            return dict(message)
        if not isinstance(content, list | tuple):
            raise InvalidRequestError(
                f"{where}.content must be a string or a list of parts, not "
                f"{type(content).__name__}",
                param="messages",
            )
        parts = [self._part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        return {**message, "content": parts}

    def _part(self, part: Any, where: str) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind not in _KINDS:
            raise InvalidRequestError(
                f"{where} must be a part with text, or with type {', '.join(_KINDS)} and the item "
                f"under that name; got type {kind!r}",
                param="messages",
            )
        return {"type": kind, "index": self._index(kind, part, where)}

    def _index(self, kind: str, part: Mapping[str, Any], where: str) -> int:
        if part.get(kind) is not None:
            self._items.setdefault(kind, []).append(part[kind])
            return len(self._items[kind]) - 1
        index = part.get("index", self._next[kind])
        known = len(self._items.get(kind, []))
        if not isinstance(index, int) or not 0 <= index < known:
            raise InvalidRequestError(
                f"{where} speaks of {kind} {index}, of which there are {known}; add it to "
                f"multi_modal_data or put it under {kind!r} in the part",
                param="messages",
            )
        self._next[kind] = index + 1
        return index
