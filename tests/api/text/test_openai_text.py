"""The `openai` package, unmodified, against text models; shapes held against its own types."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from omnistage.api.settings import ApiSettings
from omnistage.contracts.outputs import FinishReason
from omnistage.contracts.sampling import OmniTokenSamplingParams
from tests.api.fake_text_engine import RATE_HZ, TEXT_MODEL, FakeTextEngine
from tests.api.live_server import live_server

pytestmark = pytest.mark.invariant("ENTRY-INV-300")

QWEN3_TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}</think>"
    "{% if add_generation_prompt %}assistant{% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = [
    "<tool",
    '_call>\n{"name": "wea',
    'ther", "arg',
    'uments": {"city": "P',
    'aris"}}\n</tool_',
    "call>",
]
HI: Any = [{"role": "user", "content": "hi"}]
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@asynccontextmanager
async def openai_client(
    engine: FakeTextEngine, settings: ApiSettings | None = None
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        live_server(engine, settings) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=30
        ) as client,
    ):
        yield client


def with_template(tmp_path: Path, text: str = QWEN3_TEMPLATE) -> str:
    (tmp_path / "chat_template.jinja").write_text(text)
    return str(tmp_path)


def strict(kind: Any, value: Any) -> None:
    kind.model_validate(value.to_dict(), strict=True)


async def test_chat_with_every_knob() -> None:
    engine = FakeTextEngine()
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(
            model=TEXT_MODEL,
            messages=HI,
            n=2,
            stop=["a", "b"],
            max_completion_tokens=9,
            temperature=0.5,
            top_p=0.25,
            seed=3,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": -100},
            logprobs=True,
            top_logprobs=2,
            user="me",
            extra_body={
                "top_k": 5,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "min_tokens": 1,
                "ignore_eos": True,
                "stop_token_ids": [4],
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
                "priority": 2,
            },
        )
    strict(ChatCompletion, answer)
    (call,) = engine.text_calls
    assert call.writer == OmniTokenSamplingParams(
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.25,
        top_k=5,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=3,
        stop=["a", "b"],
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=2,
        logit_bias={7: -100.0},
        skip_special_tokens=False,
        delta=False,
    )
    assert (call.n, call.priority) == (2, 2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["Hello", " ", "world", "!"]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 4
    assert logprobs.content[0].top_logprobs[1].logprob == -9999.0


async def test_streams_of_several_choices_with_usage_and_logprobs() -> None:
    engine = FakeTextEngine(finish=FinishReason.LENGTH)
    async with openai_client(engine) as client:
        stream = await client.chat.completions.create(
            model=TEXT_MODEL,
            messages=HI,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
        chunks = [chunk async for chunk in stream]
    texts, tokens, reasons = ["", ""], [0, 0], ["", ""]
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or [])
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == ["Hello world!"] * 2
    assert (tokens, reasons) == ([4, 4], ["length", "length"])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


async def test_tools_are_offered_and_their_calls_stream(tmp_path: Path) -> None:
    engine = FakeTextEngine(
        script=lambda prompt, child: ["Wait. ", *CALL], model_path=with_template(tmp_path)
    )
    async with openai_client(engine) as client:
        whole = await client.chat.completions.create(
            model=TEXT_MODEL, messages=HI, tools=[TOOL], tool_choice="auto"
        )
        stream = await client.chat.completions.create(
            model=TEXT_MODEL, messages=HI, tools=[TOOL], stream=True
        )
        chunks = [chunk async for chunk in stream]
    strict(ChatCompletion, whole)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert engine.text_calls[0].prompt["tools"] == [TOOL]
    arguments, names = "", []
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            arguments += delta.function.arguments or ""
            names += [delta.function.name] if delta.id else []
    assert (names, arguments) == (["weather"], '{"city": "Paris"}')
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert len(chunks) > 4


async def test_an_answer_with_calls_can_be_sent_back(tmp_path: Path) -> None:
    engine = FakeTextEngine(script=lambda prompt, child: CALL, model_path=with_template(tmp_path))
    async with openai_client(engine) as client:
        first = await client.chat.completions.create(model=TEXT_MODEL, messages=HI, tools=[TOOL])
        message = first.choices[0].message
        (call,) = message.tool_calls or []
        history = [
            *HI,
            message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        await client.chat.completions.create(model=TEXT_MODEL, messages=history, tools=[TOOL])
    _, assistant, tool = engine.text_calls[1].prompt["messages"]
    assert assistant["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Paris"},
    }
    assert (tool["role"], tool["content"]) == ("tool", "rain")


@pytest.mark.invariant("ENTRY-INV-232")
async def test_demanded_calls_are_enforced_by_structure() -> None:
    engine = FakeTextEngine(script=lambda prompt, child: ['{"city": ', '"Rome"}'])
    async with openai_client(engine) as client:
        named = await client.chat.completions.create(
            model=TEXT_MODEL,
            messages=HI,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )
        engine.script = lambda prompt, child: ['[{"name": "weather", ', '"parameters": {}}]']
        required = await client.chat.completions.create(
            model=TEXT_MODEL,
            messages=HI,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
        )
    assert named.choices[0].finish_reason == "stop"
    (call,) = named.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == '{"city": "Rome"}'
    (call,) = required.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", "{}")
    assert required.choices[0].finish_reason == "tool_calls"
    schemas = [json.loads(c.writer.structured.json_schema or "") for c in engine.text_calls]  # type: ignore[union-attr]
    assert schemas[0].items() >= TOOL["function"]["parameters"].items()
    assert all(not schema["x-guidance"]["whitespace_flexible"] for schema in schemas)
    assert (schemas[1]["type"], schemas[1]["minItems"], schemas[1]["maxItems"]) == ("array", 1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_come_apart(tmp_path: Path, stream: bool) -> None:
    engine = FakeTextEngine(
        script=lambda prompt, child: ["<thi", "nk>\nwe", "ll\n</th", "ink>\n", "\nyes"],
        model_path=with_template(tmp_path),
    )
    async with openai_client(engine) as client:
        answer: Any = await client.chat.completions.create(
            model=TEXT_MODEL, messages=HI, stream=stream
        )
        if stream:
            deltas = [chunk.choices[0].delta async for chunk in answer]
            reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
            content = "".join(d.content or "" for d in deltas)
        else:
            message = answer.choices[0].message
            reasoning, content = message.reasoning_content, message.content
    assert (reasoning, content) == ("well", "yes")


@pytest.mark.invariant("ENTRY-INV-232")
async def test_structured_formats() -> None:
    engine = FakeTextEngine(script=lambda prompt, child: ["{}"])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with openai_client(engine) as client:
        formats: list[Any] = [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        ]
        for wanted in formats:
            await client.chat.completions.create(
                model=TEXT_MODEL, messages=HI, response_format=wanted
            )
        for extra in ({"guided_regex": "a+"}, {"structured_outputs": {"choice": ["a", "b"]}}):
            await client.chat.completions.create(model=TEXT_MODEL, messages=HI, extra_body=extra)
    none, anything, exact, regex, choice = [c.writer.structured for c in engine.text_calls]
    assert none is None
    assert anything is not None
    assert anything.json_object
    assert exact is not None
    assert json.loads(exact.json_schema or "") == schema
    assert regex is not None
    assert regex.regex == "a+"
    assert choice is not None
    assert choice.choice == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_spoken_answers(stream: bool) -> None:
    engine = FakeTextEngine(speaks=True)
    async with openai_client(engine) as client:
        answer: Any = await client.chat.completions.create(
            model=TEXT_MODEL,
            messages=HI,
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "pcm16"},
            seed=5,
            stream=stream,
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            sounds = [c.to_dict()["choices"][0]["delta"].get("audio") or {} for c in chunks]
            data = b"".join(base64.b64decode(s.get("data", "")) for s in sounds)
            transcript = "".join(s.get("transcript", "") for s in sounds)
            assert len({s["id"] for s in sounds if s}) == 1
            assert any("expires_at" in s for s in sounds)
            assert chunks[-1].choices[0].finish_reason == "stop"
            assert sum(bool(c.choices[0].finish_reason) for c in chunks) == 1
        else:
            strict(ChatCompletion, answer)
            audio = answer.choices[0].message.audio
            data, transcript = base64.b64decode(audio.data), audio.transcript
    assert transcript == "Hello world!"
    samples = np.frombuffer(data, np.int16)
    assert len(samples) == 4800
    assert np.abs(samples).max() > 16_000 * 0.9
    (call,) = engine.text_calls
    assert sorted(call.output_modalities) == ["audio", "text"]
    talker = call.params[1]
    assert isinstance(talker, OmniTokenSamplingParams)
    assert (talker.extra_args, talker.seed) == ({"voice": "Ethan"}, 5)
    assert RATE_HZ == 24_000
