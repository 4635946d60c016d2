"""What is in a block's hash: everything before it, its ids, the media in it, the salt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.ar.block_hash import BlockHasher
from omnistage.ar.prompt import MediaItem, PreparedPrompt

IDS = list(range(12))


def hashes(
    ids: list[int] = IDS, media: tuple[MediaItem, ...] = (), salt: bytes = b""
) -> list[bytes]:
    prompt = PreparedPrompt(token_ids=ids, media=media, salt=salt)
    return BlockHasher(prompt, 4).upto(ids, len(ids) // 4)


def picture(digest: bytes, *spans: tuple[int, int]) -> MediaItem:
    return MediaItem(kind="image", digest=digest, spans=spans, tensors={})


@pytest.mark.invariant("AR-INV-103")
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 2), max_size=24))
def test_hashes_are_equal_just_as_far_as_prefixes_are(one: list[int], other: list[int]) -> None:
    for index, (a, b) in enumerate(zip(hashes(one), hashes(other), strict=False)):
        last = (index + 1) * 4
        assert (a == b) == (one[:last] == other[:last])


@pytest.mark.invariant("AR-INV-103")
def test_media_count_from_the_block_that_they_are_in() -> None:
    cat, dog = hashes(media=(picture(b"cat", (5, 7)),)), hashes(media=(picture(b"dog", (5, 7)),))
    assert cat[0] == dog[0] == hashes()[0]
    assert len({cat[1], dog[1], hashes()[1]}) == 3
    assert cat[2] != dog[2]


@pytest.mark.invariant("AR-INV-103")
def test_where_media_lie_and_which_part_counts() -> None:
    assert hashes(media=(picture(b"c", (4, 6)),))[1] != hashes(media=(picture(b"c", (5, 7)),))[1]
    split, joined = picture(b"c", (0, 2), (5, 7)), picture(b"c", (5, 7))
    assert hashes(media=(split,))[1] != hashes(media=(joined,))[1]


@pytest.mark.invariant("AR-INV-103")
def test_salts_share_nothing() -> None:
    assert not set(hashes(salt=b"a")) & set(hashes(salt=b"b"))


def test_growing_a_sequence_keeps_the_hashes_that_are_there() -> None:
    hasher = BlockHasher(PreparedPrompt(token_ids=IDS), 4)
    assert hasher.upto(IDS, 2) == hashes()[:2]
    assert hasher.upto([*IDS, 1, 2, 3, 4], 4)[:3] == hashes()
