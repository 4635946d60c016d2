"""What names the content of a full cache block: equal hashes mean equal keys and values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from omnistage.ar.prompt import MediaItem, PreparedPrompt

DIGEST_BYTES = 16


class BlockHasher:
    """The hashes of one sequence's full blocks, each from the one before it, the block's token ids,
    and what of the prompt's media lies in it. Two sequences share a hash only if everything up to
    that block's end is equal."""

    def __init__(self, prompt: PreparedPrompt, block_size: int) -> None:
        self._block_size = block_size
        self._media = _places(prompt.media)
        self._hashes: list[bytes] = []
        self._root = _digest(b"salt", prompt.salt)

    def upto(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks of `token_ids`, which only ever grow."""
        size = self._block_size
        while len(self._hashes) < num_blocks:
            first = len(self._hashes) * size
            parent = self._hashes[-1] if self._hashes else self._root
            ids = np.asarray(token_ids[first : first + size], dtype="<i8").tobytes()
            self._hashes.append(_digest(parent, ids, *self._media_in(first, first + size)))
        return self._hashes[:num_blocks]

    def _media_in(self, first: int, last: int) -> list[bytes]:
        return [
            digest + struct.pack("<qq", span, start - first)
            for start, end, span, digest in self._media
            if start < last and end > first
        ]


def _places(media: Sequence[MediaItem]) -> list[tuple[int, int, int, bytes]]:
    """(first, last, number of the span within its item, digest), in order of place."""
    return sorted(
        (first, last, number, item.digest)
        for item in media
        for number, (first, last) in enumerate(item.spans)
    )


def _digest(*parts: bytes) -> bytes:
    """Parts are told apart by their lengths."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(struct.pack("<q", len(part)))
        state.update(part)
    return state.digest()
