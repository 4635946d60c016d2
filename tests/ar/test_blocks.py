"""The pool of cache blocks: no block leaks, none is in two hands, content is found by its hash."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omnistage.ar.blocks import SPARE_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Holders take, remember and free blocks at random; a model keeps count beside the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.holders: list[list[int]] = []
        self.content: dict[bytes, int] = {}
        self.names = 0

    @rule(count=st.integers(0, 6), continues=st.booleans())
    def allocate(self, count: int, continues: bool) -> None:
        if count > self.pool.num_available:
            return
        held = {block for holder in self.holders for block in holder}
        after = self.holders[-1][-1] if continues and self.holders and self.holders[-1] else None
        blocks = self.pool.allocate(count, after=after)
        assert len(set(blocks)) == count
        assert not held & set(blocks), "a block in use was given out again"
        assert SPARE_BLOCK not in blocks
        self.content = {name: one for name, one in self.content.items() if one not in blocks}
        self.holders.append(blocks)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.holders:
            self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        known = set(self.content.values())
        fresh = [one for holder in self.holders for one in holder if one not in known]
        if fresh:
            block = data.draw(st.sampled_from(fresh))
            self.names += 1
            self.pool.remember(block, b"%d" % self.names)
            self.content[b"%d" % self.names] = block

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """What is found is still where it was remembered, and taking it keeps it there."""
        if not self.content:
            return
        name = data.draw(st.sampled_from(sorted(self.content)))
        found = self.pool.match([name])
        if found:
            assert found == [self.content[name]]
            self.pool.take(found, queries=1)
            self.holders.append(found)
        else:
            del self.content[name]

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        assert all(not self.pool.match([name]) for name in self.content)
        self.content = {}

    @invariant()
    def counts_agree(self) -> None:
        held = {block for holder in self.holders for block in holder}
        assert self.pool.num_in_use == len(held)
        assert self.pool.num_available == self.pool.num_usable - len(held)

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.free(holder)
        assert self.pool.num_in_use == 0
        assert sorted(self.pool.allocate(self.pool.num_usable)) == list(range(1, 12))


@pytest.mark.invariant("AR-INV-102")
class TestPool(PoolMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_new_sequence_gets_one_run_and_grows_behind_it() -> None:
    pool = BlockPool(16, 4)
    first = pool.allocate(3)
    second = pool.allocate(2)
    assert first == [1, 2, 3]
    assert second == [9, 10], "the middle of what is left: both can grow"
    assert pool.allocate(3, after=3) == [4, 5, 6]
    assert pool.allocate(1, after=10) == [11]
    assert pool.allocate(1, after=11) == [12]
    pool.free(first)
    assert pool.allocate(3) == [1, 2, 3], "the longest run is at the start"
    assert pool.allocate(4) == [13, 14, 15, 7], "where no run is long enough"


def test_least_recently_used_content_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(5, 4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, name in zip([*old, *new], [b"a0", b"a1", b"b0", b"b1"], strict=True):
        pool.remember(block, name)
    pool.free(old)
    pool.free(new)
    assert pool.match([b"a0", b"a1"]) == old
    pool.allocate(1)
    assert pool.match([b"a0", b"a1"]) == old[:1]
    assert pool.evictions == 1
    pool.allocate(1)
    assert pool.match([b"a0"]) == []
    assert pool.match([b"b0", b"b1"]) == new


def test_equal_content_is_kept_once() -> None:
    pool = BlockPool(4, 4)
    one, other = pool.allocate(2)
    pool.remember(one, b"same")
    pool.remember(other, b"same")
    pool.free([one, other])
    assert pool.match([b"same"]) == [one]
    assert pool.num_cached == 1
    assert pool.num_available == 3


def test_freeing_twice_is_a_mistake() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_hits_and_queries_are_counted() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(1)
    pool.remember(blocks[0], b"x")
    pool.take(pool.match([b"x", b"y"]), queries=2)
    assert (pool.hits, pool.queries) == (1, 2)
