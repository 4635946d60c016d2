"""What can go wrong with the cache. Whoever loads goes on without it; nothing here reaches users,
but for wrong bytes that were already promised (`CheckpointError`, raised by `CachedWeights`)."""

from __future__ import annotations


class CacheError(Exception):
    """The cache cannot do this now; the message says why and what can be done."""


class EntryDamagedError(CacheError):
    """An entry is not what it should be: `what` names the file or block and what is wrong."""

    def __init__(self, entry: str, what: str) -> None:
        super().__init__(f"entry {entry[:12]} is damaged: {what}")
        self.what = what
