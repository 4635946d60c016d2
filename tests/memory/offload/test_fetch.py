"""A staging buffer is not written to while the device still reads it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.memory.host.private import PrivateWeights
from omnistage.memory.offload.fetch import LocalFetcher


@pytest.fixture
def weights():
    module = nn.ModuleList(nn.Linear(33, 17) for _ in range(5))
    return PrivateWeights.pack(module, [str(index) for index in range(5)])


def fetched(platform, weights, staging_bytes):
    """All images, each in memory of its own, copied one behind the other without any wait."""
    fetcher = LocalFetcher(platform, "cpu", staging_bytes)
    images, stream = [], platform.stream("cpu")
    for block in weights.blocks.values():
        images.append(torch.zeros(block.nbytes, dtype=torch.uint8))
        transfer = fetcher.prepare(weights, block, images[-1])
        assert transfer.occupies_host is not weights.is_page_locked
        with platform.stream_scope(stream):
            transfer.start()
    stream.synchronize()
    fetcher.close()
    fetcher.close()
    return images


def expected(weights):
    return [block.pieces[0].source for block in weights.blocks.values()]


@pytest.mark.invariant("OFFLOAD-INV-002")
def test_staged_copies_wait_for_their_buffer(platform, weights):
    found = fetched(platform, weights, 4096)
    assert all(map(torch.equal, found, expected(weights)))
    assert platform.unlocked_uploads == 0
    assert platform.locked_bytes == 0


def test_without_that_wait_images_are_wrong(platform, weights):
    platform.ignored_waits.add("host")
    assert not all(map(torch.equal, fetched(platform, weights, 4096), expected(weights)))


def test_page_locked_pieces_are_not_staged(platform, weights):
    weights.page_lock(platform, "cpu", None)
    calls = platform.lock_calls
    found = fetched(platform, weights, 4096)
    assert all(map(torch.equal, found, expected(weights)))
    assert platform.lock_calls == calls
    weights.close()


def test_without_page_locks_at_all_pieces_are_copied_as_they_are(platform, weights):
    platform.refuse_lock = {1}
    assert all(map(torch.equal, fetched(platform, weights, 4096), expected(weights)))
    assert platform.unlocked_uploads == 5
