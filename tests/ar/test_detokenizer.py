"""Whatever the pieces, the text is the tokenizer's own."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.ar import detokenizer
from omnistage.ar.detokenizer import MAX_HELD_TOKENS, UNFINISHED, IncrementalDetokenizer
from tests.ar import tokenizers

KINDS = {
    "byte_level": tokenizers.byte_level,
    "gemma_like": tokenizers.gemma_like,
    "llama_like": tokenizers.llama_like,
    "metaspace": tokenizers.metaspace,
    "word_pieces": tokenizers.word_pieces,
}
PAST_THE_VOCABULARY = 20


def pieces_of(tokenizer, ids, sizes, **options) -> list[str]:
    detokenizer, found, at = IncrementalDetokenizer(tokenizer, **options), [], 0
    for size in sizes:
        found.append(detokenizer.push(ids[at : at + size]))
        at += size
    found += [detokenizer.push([i]) for i in ids[at:]]
    return [*found, detokenizer.finish()]


def decoded(tokenizer, ids, skip=True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@st.composite
def token_ids(draw, tokenizer, max_size=50):
    """Any ids, and stretches of real text between them."""
    anything = st.integers(0, len(tokenizer) + PAST_THE_VOCABULARY - 1).map(lambda i: [i])
    text = st.text(max_size=12).map(lambda t: tokenizer.encode(t, add_special_tokens=False))
    parts = draw(st.lists(st.one_of(anything, text), max_size=max_size))
    return list(chain.from_iterable(parts))[:200]


@pytest.mark.invariant("AR-INV-213")
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_the_pieces_make_what_decode_makes(kind, data):
    tokenizer = KINDS[kind]()
    ids = data.draw(token_ids(tokenizer))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    skip = data.draw(st.booleans())
    found = pieces_of(tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(found) == decoded(tokenizer, ids, skip)


@pytest.mark.invariant("AR-INV-213")
@pytest.mark.parametrize("kind", ["byte_level", "gemma_like", "llama_like"])
@settings(deadline=None, max_examples=60)
@given(text=st.text(st.characters(exclude_characters="�", exclude_categories=["Cs"]), max_size=60))
def test_no_piece_of_a_text_holds_part_of_a_character(kind, text):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = pieces_of(tokenizer, ids, [])
    assert not any(UNFINISHED in piece for piece in found)
    assert "".join(found) == decoded(tokenizer, ids)


def test_a_decoder_of_one_token_at_a_time_is_noticed():
    """What the properties above refuse: decoding each id alone."""
    tokenizer = tokenizers.byte_level()
    ids = tokenizer.encode("猫 ☃", add_special_tokens=False)
    assert "".join(decoded(tokenizer, [i]) for i in ids) != decoded(tokenizer, ids)
    assert "".join(pieces_of(tokenizer, ids, [])) == "猫 ☃"


@pytest.mark.parametrize("kind", ["byte_level", "gemma_like"])
def test_a_character_leaves_when_it_is_whole(kind):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("☃", add_special_tokens=False)
    following = tokenizer.encode("x", add_special_tokens=False)
    assert len(ids) == 3
    found = pieces_of(tokenizer, ids + following, [])
    assert found[:2] == ["", ""]
    assert "".join(found) == "☃x"


def test_text_after_a_prompt_keeps_its_leading_space():
    tokenizer = tokenizers.llama_like()
    prompt, ids = (tokenizer.encode(t, add_special_tokens=False) for t in ("The", " capital"))
    alone = "".join(pieces_of(tokenizer, ids, []))
    after = "".join(pieces_of(tokenizer, ids, [], prompt_ids=prompt))
    assert (alone, after) == ("capital", " capital")
    assert decoded(tokenizer, prompt) + after == decoded(tokenizer, prompt + ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_pieces"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_text_after_a_prompt_differs_from_decode_by_a_leading_space_at_most(kind, data):
    tokenizer = KINDS[kind]()
    prompt = data.draw(token_ids(tokenizer, max_size=8))
    ids = data.draw(token_ids(tokenizer))
    found = "".join(pieces_of(tokenizer, ids, [], prompt_ids=prompt))
    assert found in (decoded(tokenizer, ids), " " + decoded(tokenizer, ids))


def test_a_long_run_of_bytes_does_not_wait_for_its_end():
    tokenizer = tokenizers.gemma_like()
    run = tokenizer.encode("☃" * MAX_HELD_TOKENS, add_special_tokens=False)
    assert len(run) == 3 * MAX_HELD_TOKENS
    found = pieces_of(tokenizer, run, [])
    assert "".join(found) == "☃" * MAX_HELD_TOKENS
    assert max(map(len, found)) <= MAX_HELD_TOKENS // 3 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_work_for_a_token_does_not_grow_with_the_text(kind, monkeypatch):
    tokenizer, lengths = KINDS[kind](), []
    original = detokenizer._Vocabulary.text
    monkeypatch.setattr(
        detokenizer._Vocabulary,
        "text",
        lambda self, ids: lengths.append(len(ids)) or original(self, ids),
    )
    detokenizing = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode(" ".join(tokenizers.CORPUS), add_special_tokens=False)
    assert "".join([*(detokenizing.push([i]) for i in ids), detokenizing.finish()])
    assert sum(lengths) <= 8 * len(ids)


@pytest.mark.parametrize("kind", ["byte_level", "gemma_like", "llama_like"])
def test_the_bytes_of_a_texts_tokens_are_its_bytes(kind):
    tokenizer, text = KINDS[kind](), "x capital 猫 ☃"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(detokenizer.token_bytes(tokenizer, i) for i in ids) == text.encode()
    assert detokenizer.token_bytes(tokenizer, len(tokenizer) + 5) == b""
