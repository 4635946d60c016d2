"""A sequence's blocks: found by prefix, allocated, remembered, given up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omnistage.ar.blocks import BlockPool
from omnistage.ar.sequence import Phase, TokenSequence


@dataclass(slots=True)
class SequenceBlocks:
    """Nothing that a step in flight may write is given back before its outcome is there."""

    pool: BlockPool

    @property
    def size(self) -> int:
        return self.pool.block_size

    def match(self, sequence: TokenSequence) -> list[int]:
        """Cached blocks that it can start from; its last token is always computed."""
        if sequence.hasher is None:
            return []
        usable = (len(sequence.token_ids) - 1) // self.size
        return self.pool.match(sequence.hasher.upto(sequence.token_ids, usable))

    def is_being_computed(
        self, sequence: TokenSequence, num_matched: int, running: Iterable[TokenSequence]
    ) -> bool:
        """Whether most of what it would compute is what one of `running` computes now, so that it
        is better off waiting for those blocks, as the siblings of an `n` are."""
        if sequence.hasher is None:
            return False
        usable = (len(sequence.token_ids) - 1) // self.size
        own = sequence.hasher.upto(sequence.token_ids, usable)
        least = num_matched + -(-(usable - num_matched) // 2)
        return num_matched < least and any(
            one.hasher is not None
            and one.num_remembered < least <= (len(one.token_ids) - 1) // self.size
            and one.hasher.upto(one.token_ids, least)[-1] == own[least - 1]
            for one in running
        )

    def start(self, sequence: TokenSequence, matched: list[int], *, headroom: int) -> bool:
        """All blocks of its tokens at once, so that they lie together; False when there are not as
        many. `headroom` blocks have to stay: those that run may each need one soon."""
        missing = -(-len(sequence.token_ids) // self.size) - len(matched)
        spare = self.pool.num_available - self.pool.num_unused(matched) - missing
        if spare < headroom:
            return False
        if sequence.hasher is not None:
            self.pool.take(matched, queries=(len(sequence.token_ids) - 1) // self.size)
        last = matched[-1] if matched else None
        sequence.blocks = matched + self.pool.allocate(missing, after=last)
        sequence.blocks_told = False
        sequence.num_computed = sequence.num_collected = len(matched) * self.size
        sequence.num_remembered = len(matched)
        if not sequence.incarnation:
            sequence.cached_tokens = sequence.num_computed
        return True

    def has_room(self, sequence: TokenSequence) -> bool:
        """Whether the next position has a block already."""
        return sequence.num_computed < len(sequence.blocks) * self.size

    def grow(self, sequence: TokenSequence) -> None:
        last = sequence.blocks[-1] if sequence.blocks else None
        sequence.blocks += self.pool.allocate(1, after=last)
        sequence.blocks_told = False

    def landed(self, sequence: TokenSequence, end: int, *, current: bool) -> None:
        """A row of it, up to position `end`, has its outcome. `current`: it wrote its blocks,
        and they are still the sequence's."""
        if current and sequence.phase is Phase.RUNNING:
            sequence.num_collected = end
            self._remember(sequence)
        if not sequence.in_flight:
            self.give_back(sequence)

    def give_up(self, sequence: TokenSequence) -> None:
        sequence.leaving_blocks += sequence.blocks
        sequence.blocks = []
        sequence.num_remembered = sequence.num_computed = sequence.num_collected = 0
        if not sequence.in_flight:
            self.give_back(sequence)

    def give_back(self, sequence: TokenSequence) -> None:
        """Nothing in flight writes to what it gave up."""
        self.pool.free(sequence.leaving_blocks)
        sequence.leaving_blocks = []

    def _remember(self, sequence: TokenSequence) -> None:
        full = sequence.num_collected // self.size
        if sequence.hasher is None or full <= sequence.num_remembered:
            return
        hashes = sequence.hasher.upto(sequence.token_ids, full)
        for index in range(sequence.num_remembered, full):
            self.pool.remember(sequence.blocks[index], hashes[index])
        sequence.num_remembered = full
