"""Messages to text, and what a client hears when they do not fit."""

from __future__ import annotations

import copy
from functools import cache

import pytest

from omnistage.ar.chat_template import prepared_messages, render_chat
from omnistage.ar.tokenizer import load_tokenizer
from omnistage.contracts.errors import InvalidRequestError
from tests.checkpoints import checkpoint

USER = {"role": "user", "content": "the cat"}
PARTS = {"role": "user", "content": [{"type": "text", "text": word} for word in ("a", "b")]}


@cache
def tokenizer(family):
    return load_tokenizer(checkpoint(family))


def templated(template, family="qwen3"):
    changed = copy.copy(tokenizer(family))
    changed.chat_template = template
    return changed


def refused(renderer, messages, *arguments, **keywords):
    with pytest.raises(InvalidRequestError) as caught:
        render_chat(renderer, messages, *arguments, **keywords)
    return caught.value.param, str(caught.value)


@pytest.mark.invariant("AR-INV-220")
def test_parts_of_text_are_joined_where_the_template_takes_text_only():
    assert "a\nb" in render_chat(tokenizer("llama"), [PARTS])
    assert "ab" in render_chat(tokenizer("qwen3"), [PARTS])


@pytest.mark.parametrize("role", ["boss", None, 3])
def test_unknown_roles_name_those_there_are(role):
    param, message = refused(tokenizer("qwen3"), [USER, {"role": role, "content": "x"}])
    assert param == "messages[1].role"
    assert "system, developer, user, assistant, tool" in message


def test_what_the_template_raises_is_the_clients_to_read():
    param, message = refused(tokenizer("gemma3"), [USER, USER])
    assert param == "messages"
    assert "roles must alternate" in message
    param, message = refused(tokenizer("llama"), [{"role": "tool", "content": "x"}])
    assert "only system, user and assistant" in message


@pytest.mark.parametrize(
    "template", ["{% for", "{{ messages[0].content + 1 }}", "{{ nothing.at_all }}"]
)
def test_a_broken_template_is_no_internal_error(template):
    param, message = refused(templated(template), [USER])
    assert param == "messages"
    assert "chat template refuses" in message


def test_without_a_template_prompts_are_named():
    param, message = refused(templated(None), [USER])
    assert param == "messages"
    assert "/v1/completions" in message


def test_a_developer_is_the_system_unless_the_template_knows_it():
    message = {"role": "developer", "content": "x"}
    assert prepared_messages([message], tokenizer("qwen3"))[0]["role"] == "system"
    knows = templated("{% if messages[0].role == 'developer' %}yes{% endif %}")
    assert render_chat(knows, [message]) == "yes"


def test_arguments_of_tool_calls_reach_the_template_as_objects():
    shows = templated("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render_chat(shows, [message]) == "Rome"
    assert call["function"]["arguments"] == '{"city": "Rome"}'
    broken = {**message, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    assert refused(shows, [broken])[0] == "messages[0].tool_calls"


def test_tools_and_variables_reach_the_template():
    shows = templated("{{ tools[0].function.name }} {{ enable_thinking }}")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert render_chat(shows, [USER], tools, {"enable_thinking": False}) == "weather False"


@pytest.mark.invariant("AR-INV-223")
@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "add_generation_prompt"])
def test_clients_set_no_template_and_no_argument_of_the_library(name):
    param, message = refused(tokenizer("qwen3"), [USER], None, {name: "{{ 1 }}"})
    assert param == "chat_template_kwargs"
    assert name in message


@pytest.mark.parametrize(
    "messages", ["hello", [], [5], [{"role": "user", "content": [{"type": "text"}]}]]
)
def test_what_are_no_messages_is_refused(messages):
    assert refused(tokenizer("qwen3"), messages)[0].startswith("messages")
