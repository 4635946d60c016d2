"""Encoders' results by content, bounded in bytes: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any


class MediaCache:
    """Results are tensors, or lists, tuples and dicts of such. One that alone is larger than the
    bound is not kept. What a sequence holds lives on with it after it was evicted here."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: bytes) -> Any | None:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        return entry[0]

    def put(self, digest: bytes, result: Any) -> None:
        size_bytes = result_bytes(result)
        if digest in self._entries:
            self.total_bytes -= self._entries.pop(digest)[1]
        if size_bytes > self._max_bytes:
            return
        self._entries[digest] = (result, size_bytes)
        self.total_bytes += size_bytes
        while self.total_bytes > self._max_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self.total_bytes -= freed_bytes

    def clear(self) -> None:
        self._entries.clear()
        self.total_bytes = 0


def result_bytes(result: Any) -> int:
    if hasattr(result, "element_size"):
        return int(result.numel() * result.element_size())
    parts: Iterable[Any] = result.values() if isinstance(result, dict) else ()
    if isinstance(result, list | tuple):
        parts = result
    return sum(result_bytes(part) for part in parts)
