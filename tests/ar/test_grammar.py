"""A grammar allows what its specification allows, and refuses broken specifications politely."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from omnistage.ar import grammar as grammar_module
from omnistage.ar.grammar import Grammar, GrammarCompiler
from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    UnsupportedCombinationError,
)
from omnistage.contracts.sampling import StructuredOutput
from tests.ar import tokenizers

PADDING = 37
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["name", "list"],
        "additionalProperties": False,
    }
)


def compiler(kind=tokenizers.byte_level) -> GrammarCompiler:
    tokenizer = kind()
    return GrammarCompiler(tokenizer, len(tokenizer) + PADDING, [tokenizer.eos_token_id])


def allowed(grammar: Grammar) -> list[int]:
    mask = grammar.bitmask()
    assert mask.dtype == "int32"
    return [32 * w + i for w, word in enumerate(mask.tolist()) for i in range(32) if word >> i & 1]


def follow(choose, structured: StructuredOutput, kind=tokenizers.byte_level, limit=80) -> str:
    """The text of `choose(allowed ids)`, step after step, until nothing can follow."""
    compiling = compiler(kind)
    grammar, ids = Grammar(compiling.compile(structured)), []
    eos = compiling.tokenizer.eos_token_id
    while not grammar.is_terminated():
        options = allowed(grammar)
        over = eos in options and len(ids) >= limit
        token = eos if over else choose(options)
        grammar.accept(token)
        if token != eos:
            ids.append(token)
    return compiling.tokenizer.decode(ids)


@pytest.mark.invariant("AR-INV-214")
@pytest.mark.parametrize("kind", [tokenizers.byte_level, tokenizers.gemma_like])
@pytest.mark.parametrize("seed", range(10))
def test_any_path_through_a_schema_is_an_instance_of_it(kind, seed):
    random = Random(seed)
    closers = set(kind().convert_tokens_to_ids(['"', "}", "]"]))

    def choose(options):
        closing = [i for i in options if i in closers]
        return random.choice(closing if closing and random.random() < 0.5 else options)

    found = json.loads(follow(choose, StructuredOutput(json_schema=SCHEMA), kind))
    assert set(found) == {"name", "list"}
    assert len(found["name"]) <= 5
    assert all(isinstance(item, int) for item in found["list"])
    assert len(found["list"]) <= 3


@pytest.mark.invariant("AR-INV-214")
@pytest.mark.parametrize("seed", range(10))
def test_any_path_through_a_regex_matches_it(seed):
    text = follow(
        Random(seed).choice, StructuredOutput(regex=r"[a-f]{2,4}-(cat|[0-9]+x)"), limit=30
    )
    assert re.fullmatch(r"[a-f]{2,4}-(cat|[0-9]+x)", text)


def test_a_path_that_ignores_the_mask_is_noticed():
    grammar = Grammar(compiler().compile(StructuredOutput(regex="ab")))
    forbidden = tokenizers.byte_level().convert_tokens_to_ids("b")
    assert forbidden not in allowed(grammar)
    with pytest.raises(InternalError, match="does not fit"):
        grammar.accept(forbidden)


CHOICES = ["yes", 'no "quoted"', "vielleicht ü", "猫", "😀 and\nmore", "back\\slash"]


@pytest.mark.parametrize("wanted", CHOICES)
def test_a_choice_is_one_of_the_strings(wanted):
    compiling = compiler()
    grammar = Grammar(compiling.compile(StructuredOutput(choice=CHOICES)))
    for token in compiling.tokenizer.encode(wanted, add_special_tokens=False):
        assert token in allowed(grammar)
        grammar.accept(token)
    assert grammar.is_terminated()


def test_json_object_allows_objects_only():
    compiling = compiler()
    first = allowed(Grammar(compiling.compile(StructuredOutput(json_object=True))))
    texts = [compiling.tokenizer.decode([token]) for token in first]
    assert "{" in texts
    assert all(text.startswith("{") for text in texts)


def test_a_lark_grammar_is_followed():
    lark = 'start: "1" ("+" DIGIT)*\nDIGIT: /[0-9]/'
    text = follow(lambda options: options[-1], StructuredOutput(grammar=lark), limit=6)
    assert re.fullmatch(r"1(\+[0-9])*", text)


@pytest.mark.invariant("AR-INV-214")
@pytest.mark.parametrize("vocab_size", [416, 417, 447, 448, 512])
def test_a_model_with_more_logits_than_tokens_never_gets_the_surplus(vocab_size):
    tokenizer = tokenizers.byte_level()
    assert len(tokenizer) < vocab_size
    compiling = GrammarCompiler(tokenizer, vocab_size, [tokenizer.eos_token_id])
    grammar = Grammar(compiling.compile(StructuredOutput(regex="(?s:.*)")))
    assert len(grammar.bitmask()) == (vocab_size + 31) // 32
    assert len(allowed(grammar)) > 200
    assert max(allowed(grammar)) < len(compiling.tokenizer)
    special = compiling.tokenizer.convert_tokens_to_ids(tokenizers.START)
    assert special not in allowed(grammar)


def test_the_end_is_allowed_when_the_text_is_complete_and_only_then():
    compiling = compiler()
    eos, a = compiling.tokenizer.eos_token_id, compiling.tokenizer.convert_tokens_to_ids("a")
    grammar = Grammar(compiling.compile(StructuredOutput(regex="a{1,2}")))
    assert eos not in allowed(grammar)
    grammar.accept(a)
    assert eos in allowed(grammar)
    assert not grammar.is_terminated()
    grammar.accept(eos)
    assert grammar.is_terminated()
    with pytest.raises(InternalError):
        grammar.accept(a)


def test_requests_do_not_share_their_place_and_can_go_back():
    compiling = compiler()
    a, b, eos = (compiling.tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", tokenizers.END))
    compiled = compiling.compile(StructuredOutput(regex="ab?"))
    one, other = Grammar(compiled), Grammar(compiled)
    one.accept(a)
    assert a in allowed(other)
    one.accept(b)
    one.rollback(1)
    assert b in allowed(one)
    one.accept(eos)
    one.rollback(2)
    assert not one.is_terminated()
    assert allowed(one) == allowed(other)


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        (StructuredOutput(), "exactly one"),
        (StructuredOutput(regex="a", json_object=True), "regex"),
        (StructuredOutput(regex="a(b"), "unclosed group"),
        (StructuredOutput(json_schema='{"type": "intger"}'), "intger"),
        (StructuredOutput(json_schema='{"type": '), "refused"),
        (StructuredOutput(grammar="start: missing"), "missing"),
        (StructuredOutput(choice=[]), "0 entries"),
        (StructuredOutput(choice=["x"] * (grammar_module.MAX_CHOICES + 1)), "4096"),
        (StructuredOutput(regex="a" * (grammar_module.MAX_SPEC_BYTES + 1)), "bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_specification_is_the_callers_error(structured, message):
    with pytest.raises(InvalidRequestError, match=message) as raised:
        compiler().compile(structured)
    assert raised.value.param == "response_format"
    assert len(str(raised.value)) < 1000


def test_a_grammar_that_grows_too_complex_is_the_callers_error(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_LEXER_STATES", 20)
    compiling = compiler()
    token = compiling.tokenizer.convert_tokens_to_ids("a")

    def many_steps():
        grammar = Grammar(compiling.compile(StructuredOutput(regex=".*(a|b)[a-z]{20}")))
        for _ in range(100):
            grammar.bitmask()
            grammar.accept(token)

    with pytest.raises(InvalidRequestError, match="refused"):
        many_steps()


def test_what_cannot_be_constrained_is_refused():
    with pytest.raises(UnsupportedCombinationError, match="fast tokenizer"):
        GrammarCompiler(object(), 10, [1]).compile(StructuredOutput(regex="a"))
    with pytest.raises(UnsupportedCombinationError, match="end-of-sequence"):
        GrammarCompiler(tokenizers.byte_level(), 500, []).compile(StructuredOutput(regex="a"))


def test_equal_specifications_are_compiled_once_and_the_cache_is_bounded():
    compiling = compiler()
    first = compiling.compile(StructuredOutput(regex="a"))
    assert compiling.compile(StructuredOutput(regex="a")) is first
    for number in range(grammar_module.MAX_CACHED):
        compiling.compile(StructuredOutput(regex=f"b{number}"))
    assert compiling.compile(StructuredOutput(regex="a")) is not first
    assert len(compiling._cache) == grammar_module.MAX_CACHED


def test_blanks_in_json_come_to_an_end_and_indentation_is_allowed():
    """Whoever prefers blanks wherever they are allowed is through all the same."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    structured = StructuredOutput(json_schema=json.dumps(schema))
    words = tokenizers.byte_level()

    def blank_first(options: list[int]) -> int:
        return max(options, key=lambda one: (not words.decode([one]).strip(), -one))

    text = follow(blank_first, structured, limit=10**6)
    assert set(json.loads(text)) == {"a"}
    assert len(text) < 1000

    grammar = Grammar(compiler().compile(structured))
    for token in words(json.dumps({"a": True}, indent=8)).input_ids:
        grammar.accept(token)


def test_a_schema_may_forbid_blanks():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
        "x-guidance": {
            "whitespace_flexible": False,
            "item_separator": ",",
            "key_separator": ":",
        },
    }
    structured = StructuredOutput(json_schema=json.dumps(schema))
    words = tokenizers.byte_level()

    def blank_first(options: list[int]) -> int:
        return max(options, key=lambda one: (not words.decode([one]).strip(), -one))

    assert follow(blank_first, structured) in ('{"a":true}', '{"a":false}')
