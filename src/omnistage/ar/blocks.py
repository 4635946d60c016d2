"""The blocks of the KV cache: who uses which, which are kept for equal prefixes, which are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

SPARE_BLOCK = 0
"""Takes the writes of padding rows; never allocated."""
_MAX_SEARCHED_BLOCKS = 8192
"""In larger pools, which only GPUs have, runs are not looked for: there they save nothing."""


class BlockPool:
    """Blocks 1 … num_blocks - 1, each of `block_size` positions.

    A block is free, in use (by as many sequences as it has references), or cached: unused, but its
    content is known by a hash and may be used again. Cached blocks count as available and are
    evicted, least recently used first, when no free one is left.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._is_free = np.ones(num_blocks, dtype=bool)
        self._is_free[SPARE_BLOCK] = False
        self._num_free = num_blocks - 1
        self.queries = self.hits = self.evictions = 0

    @property
    def num_usable(self) -> int:
        """All that can be allocated at all."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Free and cached blocks."""
        return self._num_free + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.num_usable - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks, in use or not, whose content can be found by hash."""
        return len(self._hash_of)

    # prefixes ---------------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix. Takes no reference and counts no query."""
        found: list[int] = []
        for one in hashes:
            block = self._block_of.get(one)
            if block is None:
                break
            found.append(block)
        return found

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` stop being available when they are taken."""
        return sum(self._references[block] == 0 for block in blocks)

    def take(self, matched: Sequence[int], queries: int) -> None:
        """Use the blocks of a match, out of `queries` blocks that were asked for."""
        self.queries += queries
        self.hits += len(matched)
        for block in matched:
            self._cached.pop(block, None)
            self._references[block] += 1

    def remember(self, block: int, content: bytes) -> None:
        """The block is full and computed. The first block of some content is the one found."""
        assert self._references[block] > 0, f"block {block} is not in use"
        if block not in self._hash_of and content not in self._block_of:
            self._hash_of[block] = content
            self._block_of[content] = block

    # allocation -------------------------------------------------------------------------------

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks, each with one reference; the caller has checked `num_available`. They
        continue at `after` + 1 where that is free, and are one run where there is one."""
        assert 0 <= count <= self.num_available, f"{count} of {self.num_available} blocks"
        blocks: list[int] = []
        while after is not None and len(blocks) < count and self._free_at(after + 1):
            after += 1
            self._use(after)
            blocks.append(after)
        missing = count - len(blocks)
        self._evict(missing - self._num_free)
        for block in self._best_run(missing):
            self._use(block)
            blocks.append(block)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one reference of each. Of one sequence's blocks the last is evicted first."""
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._release(block)

    def reset(self) -> None:
        """Forget all content. Blocks in use stay so, and are found by nobody."""
        for block in self._cached:
            self._release(block)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()

    def _evict(self, count: int) -> None:
        for _ in range(count):
            block, _nothing = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
            self._release(block)
            self.evictions += 1

    def _free_at(self, block: int) -> bool:
        return block < self.num_blocks and bool(self._is_free[block])

    def _use(self, block: int) -> None:
        self._is_free[block] = False
        self._num_free -= 1
        self._references[block] = 1

    def _release(self, block: int) -> None:
        self._is_free[block] = True
        self._num_free += 1

    def _best_run(self, count: int) -> list[int]:
        """Free blocks from the longest run; from several, longest first, where none is enough.
        Behind a block in use the run is entered in its middle, so that both can grow."""
        if count <= 0:
            return []
        if self.num_blocks > _MAX_SEARCHED_BLOCKS:
            if count == 1:
                return [int(self._is_free.argmax())]
            return [int(block) for block in np.flatnonzero(self._is_free)[:count]]
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, ends = edges[0::2], edges[1::2]
        found: list[int] = []
        for run in np.argsort(starts - ends, kind="stable"):
            first, end, missing = int(starts[run]), int(ends[run]), count - len(found)
            if first - 1 != SPARE_BLOCK:
                first += max(0, end - first - missing) // 2
            found.extend(range(first, min(end, first + missing)))
            if len(found) == count:
                break
        return found
