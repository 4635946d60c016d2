"""Ranks that share streamed weights: equal to one that holds all, bit for bit, or a clear error."""

from __future__ import annotations

import pytest

from tests.memory.offload import distributed_work as work
from tests.memory.offload.ranks import on_ranks


@pytest.mark.invariant("OFFLOAD-INV-020")
@pytest.mark.parametrize("residents", [(), (1, 3)])
@pytest.mark.parametrize("name", ["qwen", "flux"])
def test_gathered_equals_resident_bit_for_bit(name, residents):
    for result in on_ranks(work.passes, name, residents, {}):
        equal, described, (locked_bytes, left_bytes), overtaken = result
        assert equal == [True] * 3
        assert described["shares"] == 2
        assert 0 < locked_bytes
        assert (left_bytes, overtaken) == (0, 0)
