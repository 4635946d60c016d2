from __future__ import annotations

import torch

from omnistage.ar.media_cache import MediaCache


def result(kib: int) -> dict[str, list[torch.Tensor]]:
    return {"features": [torch.zeros(kib * 1024, dtype=torch.uint8)]}


def test_the_least_recently_used_go_first():
    cache = MediaCache(10 * 1024)
    cache.put(b"a", result(4))
    cache.put(b"b", result(4))
    assert cache.get(b"a") is not None
    cache.put(b"c", result(4))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    assert cache.total_bytes == 8 * 1024


def test_what_is_larger_than_the_cache_is_not_kept():
    cache = MediaCache(1024)
    cache.put(b"a", result(2))
    assert (len(cache), cache.total_bytes) == (0, 0)


def test_the_same_content_counts_once():
    cache = MediaCache(10 * 1024)
    for _ in range(3):
        cache.put(b"a", result(3))
    assert cache.total_bytes == 3 * 1024
