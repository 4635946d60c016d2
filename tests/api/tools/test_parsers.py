"""However a text is cut, its calls are the same; and they are what the models meant."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.api.protocol.tool_fields import FunctionDefinition
from omnistage.api.reasoning import ThinkSplitter
from omnistage.api.text.choice import AnswerReader, Choice
from omnistage.api.tools.base import PlainText, ToolParser
from omnistage.api.tools.forced import NamedParser, RequiredParser
from omnistage.api.tools.registry import make_tool_parser

pytestmark = pytest.mark.invariant("ENTRY-INV-230")

WEATHER = FunctionDefinition(
    name="weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "boolean"},
            "tags": {"type": "array"},
            "unit": {"type": ["string", "null"]},
        },
    },
)
Make = Callable[[Callable[[], str]], ToolParser]

MAKERS: dict[str, Make] = {
    "plain": lambda new_id: PlainText(),
    "hermes": lambda new_id: make_tool_parser("hermes", [WEATHER], parallel=True, new_id=new_id),
    "hermes one": lambda new_id: make_tool_parser(
        "hermes", [WEATHER], parallel=False, new_id=new_id
    ),
    "xml": lambda new_id: make_tool_parser("qwen3_coder", [WEATHER], parallel=True, new_id=new_id),
    "xml one": lambda new_id: make_tool_parser(
        "qwen3_coder", [WEATHER], parallel=False, new_id=new_id
    ),
    "required": lambda new_id: RequiredParser(new_id=new_id),
    "named": lambda new_id: NamedParser("weather", new_id=new_id),
}

PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "weather>",
    "<parameter=",
    "</parameter>",
    "city>",
    "days>",
    "<think>",
    "</think>",
    "<",
    ">",
    "\n",
    " ",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    '"name"',
    '"arguments"',
    '"weather"',
    '{"name": "weather"',
    '<tool_call>{"name": "weather", "arguments": {',
    '{"name": "weather", "arguments": {"city": "Paris"}}',
    '{"arguments": {"a": [1, "}"]}, "name": "weather"}',
    "Hello",
    "é😀",
    "7",
]


def read(make: Make, chunks: Sequence[str], begins_inside: bool | None = None) -> dict[str, Any]:
    numbers = itertools.count()
    splitter = None if begins_inside is None else ThinkSplitter(begins_inside=begins_inside)
    choice = Choice(0, AnswerReader(make(lambda: f"id{next(numbers)}"), splitter))
    for chunk in chunks:
        choice.add(choice.reader.feed(chunk))
    choice.add(choice.reader.finish())
    calls = [(call.id, call.name, call.arguments) for call in choice.calls]
    return {"content": choice.content, "reasoning": choice.reasoning, "calls": calls}


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14),
    places=st.lists(st.integers(0, 10_000), max_size=12),
    begins_inside=st.sampled_from([None, False, True]),
)
def test_streaming_equals_not_streaming(
    name: str, pieces: list[str], places: list[int], begins_inside: bool | None
) -> None:
    text = "".join(pieces)
    whole = read(MAKERS[name], [text], begins_inside)
    assert read(MAKERS[name], cut(text, places), begins_inside) == whole
    assert read(MAKERS[name], list(text), begins_inside) == whole


PARIS = '{"city": "Paris", "days": 2}'
HERMES = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": ' + PARIS + "}\n</tool_call>\n"
    '<tool_call>\n{"arguments": {}, "name": "time"}\n</tool_call>'
)
XML = (
    "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n<parameter=wind>\nTrue\n</parameter>\n"
    '<parameter=tags>\n["a", 1]\n</parameter>\n<parameter=unit>\n7\n</parameter>\n'
    "</function>\n</tool_call>"
)


def test_hermes_calls() -> None:
    answer = read(MAKERS["hermes"], [HERMES])
    assert answer["content"] == "I look."
    assert answer["calls"] == [("id0", "weather", PARIS), ("id1", "time", "{}")]
    assert len(read(MAKERS["hermes one"], [HERMES])["calls"]) == 1


def test_hermes_arguments_in_other_clothes() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(MAKERS["hermes"], [text])["calls"] == [("id0", "f", '{"a": 1}')]
    text = '<tool_call>{"name": "f"}</tool_call> and on'
    answer = read(MAKERS["hermes"], [text])
    assert (answer["calls"], answer["content"]) == ([("id0", "f", "{}")], " and on")


@pytest.mark.parametrize(
    "text", ["<tool_call>nonsense</tool_call>", "<tool_call>", '<tool_call>{"a', "a < b <tool"]
)
@pytest.mark.parametrize("name", ["hermes", "xml"])
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert read(MAKERS[name], [text]) == {"content": text, "reasoning": "", "calls": []}


def test_xml_values_have_their_schemas_types() -> None:
    answer = read(MAKERS["xml"], [XML])
    assert answer["content"] == "I look."
    ((_, name, arguments),) = answer["calls"]
    assert name == "weather"
    assert json.loads(arguments) == {
        "city": "Paris",
        "days": 2,
        "wind": True,
        "tags": ["a", 1],
        "unit": "7",
    }


def test_xml_without_the_outer_tag_and_two_calls() -> None:
    text = "<function=f>\n<parameter=a>1</parameter></function>\n<function=g>\n</function>"
    answer = read(MAKERS["xml"], [text])
    assert answer["calls"] == [("id0", "f", '{"a": 1}'), ("id1", "g", "{}")]
    assert answer["content"] == ""
    assert len(read(MAKERS["xml one"], [text])["calls"]) == 1


def test_arguments_leave_before_the_call_is_over() -> None:
    choice = Choice(0, AnswerReader(MAKERS["hermes"](lambda: "id"), None))
    choice.add(choice.reader.feed('<tool_call>{"name": "f", "arguments": {"a": "lon'))
    assert choice.calls[0].arguments == '{"a": "lon'


def test_forced_calls() -> None:
    text = ' [{"name": "f", "parameters": {"a": "]}"}}, {"name": "g", "parameters": {}}]'
    answer = read(MAKERS["required"], [text])
    assert answer["calls"] == [("id0", "f", '{"a": "]}"}'), ("id1", "g", "{}")]
    assert answer["content"] == ""
    assert read(MAKERS["named"], [' {"a": 1}'])["calls"] == [("id0", "weather", '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "begins_inside", "reasoning", "content"),
    [
        ("<think>\nwell\n</think>\n\nyes", False, "well", "yes"),
        ("well\n</think>\n\nyes", True, "well", "yes"),
        ("<think>well</think>yes", True, "well", "yes"),
        ("\n<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("yes </think> no", False, "", "yes </think> no"),
        (" yes", False, "", " yes"),
        ("<think>cut o", False, "cut o", ""),
        ("<think>cut o</thi", False, "cut o</thi", ""),
        ("<thin", False, "", "<thin"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
    ],
)
def test_thoughts_come_apart(text: str, begins_inside: bool, reasoning: str, content: str) -> None:
    answer = read(MAKERS["plain"], [text], begins_inside)
    assert (answer["reasoning"], answer["content"]) == (reasoning, content)


def test_calls_after_a_thought_and_none_within() -> None:
    text = f"<think>maybe <tool_call>x</tool_call></think>{HERMES}"
    answer = read(MAKERS["hermes"], [text], False)
    assert answer["reasoning"] == "maybe <tool_call>x</tool_call>"
    assert [name for _, name, _ in answer["calls"]] == ["weather", "time"]
