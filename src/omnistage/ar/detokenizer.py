"""Text of a growing sequence of token ids: never half a character, linear time in all.

What it gives, put together, is `tokenizer.decode(ids, clean_up_tokenization_spaces=False)` with
two exceptions. Where there is a prompt, the text continues it: the leading space that SentencePiece
style decoders (Metaspace, Strip) take off a text's first word stays. And where a byte-fallback
tokenizer yields more than `MAX_HELD_TOKENS` byte tokens in a row, whole characters among them leave
then; `decode` replaces each byte of a run, however long, of which any part is no UTF-8.

`tokenizers.decoders.DecodeStream` does not do: it raises "Invalid prefix encountered" on runs of
bytes that are no UTF-8 (tokenizers 0.23), and holds a byte-level text back for as long as it ends
in one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

MAX_HELD_TOKENS = 64
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class _Decoding(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class IncrementalDetokenizer:
    """Of one sequence. `tokenizer` is a fast `transformers` tokenizer; ids that it does not know
    (a model's vocabulary may be larger) give no text, as in `decode`."""

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = vocabulary = _vocabulary_of(tokenizer)
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._decoding: _Decoding
        if vocabulary.byte_level:
            self._decoding = _ByteLevelDecoding(vocabulary)
        else:
            shown = (i for i in reversed(prompt_ids) if self._is_shown(i))
            before = next((i for i in shown if not vocabulary.is_byte(i)), None)
            self._decoding = _SegmentDecoding(vocabulary, before)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these further ids complete."""
        return self._decoding.push([i for i in ids if self._is_shown(i)])

    def finish(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""
        return self._decoding.finish()

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._vocabulary.is_known(token_id)


class _Vocabulary:
    """What is asked of a tokenizer again and again, read once."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend = tokenizer.backend_tokenizer
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        kinds = _decoder_kinds(self.backend)
        self.byte_level = kinds == {"ByteLevel"}
        self.byte_fallback = "ByteFallback" in kinds
        self.bytes_of = lru_cache(maxsize=None)(self._bytes_of)

    def is_byte(self, token_id: int) -> bool:
        token = self.backend.id_to_token(token_id)
        return self.byte_fallback and token is not None and bool(BYTE_TOKEN.fullmatch(token))

    def is_known(self, token_id: int) -> bool:
        return self.backend.id_to_token(token_id) is not None

    @cached_property
    def word(self) -> int | None:
        """Any token of letters: what stands before a text that began with bytes only."""
        vocabulary = sorted(self.backend.get_vocab().items(), key=lambda item: item[1])
        return next((i for token, i in vocabulary if token.isascii() and token.isalpha()), None)

    def text(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def _bytes_of(self, token_id: int) -> bytes:
        """A byte-level token spells bytes; one with any other character is itself."""
        token = self.backend.id_to_token(token_id)
        values = [_byte_alphabet().get(character) for character in token]
        if None in values:
            return token.encode()
        return bytes(value for value in values if value is not None)


class _ByteLevelDecoding:
    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SegmentDecoding:
    """Decodes piece by piece, each behind a token before it: decoders treat the first token of a
    text in their own way."""

    def __init__(self, vocabulary: _Vocabulary, before: int | None) -> None:
        self._vocabulary = vocabulary
        self._before = [] if before is None else [before]
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))

    def _push_one(self, token_id: int) -> str:
        if not self._vocabulary.is_byte(token_id):
            self._held.append(token_id)
            return self._release(self._held)
        self._held.append(token_id)
        if len(self._held) <= MAX_HELD_TOKENS:
            return ""
        return "" if UNFINISHED in self._text(self._held) else self._release(self._held)

    def finish(self) -> str:
        return self._release(self._held)

    def _release(self, ids: list[int]) -> str:
        text = self._text(ids)
        self._held = []
        last = ids[-1] if ids and not self._vocabulary.is_byte(ids[-1]) else self._vocabulary.word
        if ids and last is not None:
            self._before = [last]
        return text

    def _text(self, ids: list[int]) -> str:
        before = self._vocabulary.text(self._before) if self._before else ""
        return self._vocabulary.text(self._before + ids)[len(before) :]


def _decoder_kinds(backend: Any) -> set[str]:
    """By the decoder's own description: the whole tokenizer's takes a second to write."""
    if backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in decoder.get("decoders", [decoder])}


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable bytes stand for themselves, the others for the
    characters from 256 on, in order (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_VOCABULARIES: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


def _vocabulary_of(tokenizer: Any) -> _Vocabulary:
    """One a tokenizer, as long as it lives."""
    if tokenizer not in _VOCABULARIES:
        _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
    return _VOCABULARIES[tokenizer]


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """What one token adds to a text that has begun; empty for an id that is no token. A character
    that takes several tokens has some of its bytes in each."""
    vocabulary = _vocabulary_of(tokenizer)
    if not vocabulary.is_known(token_id):
        return b""
    if vocabulary.byte_level:
        return vocabulary.bytes_of(token_id)
    if vocabulary.is_byte(token_id):
        return bytes([int(vocabulary.backend.id_to_token(token_id)[3:5], 16)])
    before = [] if vocabulary.word is None else [vocabulary.word]
    return vocabulary.text([*before, token_id])[len(vocabulary.text(before)) :].encode()
