"""Structured output: which tokens may come next, by llguidance.

A `GrammarCompiler` belongs to one tokenizer and is safe to use from several threads; a `Grammar`
belongs to one request and to one thread at a time.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from omnistage.contracts.sampling import StructuredOutput

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

PARAM = "response_format"
MAX_SPEC_BYTES = 256 * 1024
MAX_CHOICES = 4096
MAX_CACHED = 64
MAX_LEXER_STATES = 50_000
"""About 2 kB each: the bound on what one request's grammar may take of memory is 100 MB."""
ANY_OBJECT = '{"type": "object"}'
JSON_WHITESPACE = r" {1,2}|\n[ \t]{0,64}"
"""Between any two tokens of JSON, as people indent it: without a bound a model may go on with
whitespace until its tokens are spent. A schema's own `x-guidance` wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGrammar:
    """A grammar in its first state; every request works on a copy."""

    matcher: LLMatcher
    eos_ids: frozenset[int]
    words: int
    """int32 words of a bitmask."""


@dataclass(slots=True)
class GrammarCompiler:
    """Compiles for `tokenizer`, a fast `transformers` tokenizer, and a model with `vocab_size`
    logits, which may be more than the tokenizer has tokens: those are never allowed."""

    tokenizer: Any
    vocab_size: int
    eos_ids: Collection[int]
    _adapter: LLTokenizer | None = None
    _cache: OrderedDict[bytes, CompiledGrammar] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Cached by content. The first call of all builds the tokenizer's trie (about a second for
        150,000 tokens): call it off the scheduling thread.

        Raises `InvalidRequestError` for a specification that is broken, too large, or uses what
        llguidance does not know, with its message; `UnsupportedCombinationError` where the
        tokenizer is slow or the model has no end-of-sequence token.
        """
        key = msgspec.json.encode(structured)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            adapter = self._ready_adapter()
        compiled = self._compiled(adapter, grammar_text(structured))
        with self._lock:
            self._cache[key] = compiled
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _ready_adapter(self) -> LLTokenizer:
        if self._adapter is None:
            self._adapter = _tokenizer_adapter(self.tokenizer, self.vocab_size, self.eos_ids)
        return self._adapter

    def _compiled(self, adapter: LLTokenizer, text: str) -> CompiledGrammar:
        import llguidance

        limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(adapter, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return CompiledGrammar(
            matcher=matcher, eos_ids=frozenset(self.eos_ids), words=(self.vocab_size + 31) // 32
        )


class Grammar:
    """Where one request stands in its grammar. Outlives preemptions: it knows only tokens."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._ended = False

    def bitmask(self) -> np.ndarray:
        """(ceil(vocab_size / 32),) int32: bit i of word w allows token 32 w + i. Once terminated,
        only end-of-sequence tokens are allowed.

        Raises `InvalidRequestError` when the grammar turns out too complex at this state.
        """
        import numpy as np

        mask = np.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=np.int32)
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())
        assert len(mask) >= self._compiled.words
        return mask[: self._compiled.words]

    def accept(self, token_id: int) -> None:
        """The request generated this token. Raises `InternalError` where the grammar forbids it:
        whoever sampled did not apply the bitmask of this state."""
        if token_id in self._compiled.eos_ids and self._matcher.is_accepting():
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token_id):
            raise InternalError(
                "a generated token does not fit the requested grammar",
                detail=f"token {token_id}: {self._matcher.get_error() or 'after the end'}",
            )

    def is_terminated(self) -> bool:
        """Only the end can follow: the sequence may stop without an end-of-sequence token."""
        return self._ended or self._matcher.is_stopped()

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` accepted ones."""
        if self._ended and num_tokens:
            self._ended, num_tokens = False, num_tokens - 1
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise InternalError("a grammar cannot go back", detail=self._matcher.get_error())


def grammar_text(structured: StructuredOutput) -> str:
    """llguidance's form of a specification. Raises `InvalidRequestError`."""
    from llguidance import LLMatcher

    given = [name for name in structured.__struct_fields__ if _is_given(getattr(structured, name))]
    if len(given) != 1:
        raise InvalidRequestError(
            "a structured output needs exactly one of "
            f"{', '.join(structured.__struct_fields__)}, got {', '.join(given) or 'none'}",
            param=PARAM,
        )
    _check_size(structured)
    if structured.choice is not None:
        return LLMatcher.grammar_from_lark(_choice_grammar(structured.choice))
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    return _schema_grammar(structured.json_schema or ANY_OBJECT)


def _schema_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    defaults = {} if _says_whitespace(schema) else {"whitespace_pattern": JSON_WHITESPACE}
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    except ValueError as error:
        raise _refused(str(error)) from None


def _says_whitespace(schema: str) -> bool:
    """A pattern given as a default would undo `whitespace_flexible: false`."""
    try:
        parsed = json.loads(schema)
    except ValueError:
        return False  # llguidance says what is wrong with it.
    guidance = parsed.get("x-guidance") if isinstance(parsed, dict) else None
    return isinstance(guidance, dict) and any("whitespace" in name for name in guidance)


def _choice_grammar(choice: list[str]) -> str:
    if not choice or len(choice) > MAX_CHOICES:
        raise InvalidRequestError(
            f"choice has {len(choice)} entries, 1 to {MAX_CHOICES} are allowed", param=PARAM
        )
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _check_size(structured: StructuredOutput) -> None:
    size = len(msgspec.json.encode(structured))
    if size > MAX_SPEC_BYTES:
        raise InvalidRequestError(
            f"the structured output's specification has {size} bytes, at most {MAX_SPEC_BYTES} "
            "are allowed",
            param=PARAM,
        )


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the structured output is refused: {message.strip()}", param=PARAM)


def _tokenizer_adapter(tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedCombinationError(
            f"structured output needs a fast tokenizer, this model has {type(tokenizer).__name__}",
            param=PARAM,
        )
    if not eos_ids:
        raise UnsupportedCombinationError(
            "structured output needs an end-of-sequence token, this model names none", param=PARAM
        )
    size = max(vocab_size, len(tokenizer))
    return from_tokenizer(tokenizer, n_vocab=size, eos_token=sorted(eos_ids))
