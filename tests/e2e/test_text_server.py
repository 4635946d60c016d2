"""The `openai` package, unmodified, against `omnistage serve` of a tiny Qwen3.

Its words are random, their form is not.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.checkpoints import checkpoint
from tests.e2e.serving import GUARD_S, Server, serving, wait_until

pytestmark = pytest.mark.slow

NAME = "tiny"
HI: Any = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
LIGHT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "colour": {"enum": ["red", "blue"]},
        "steps": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["on", "colour", "steps"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "switch", "parameters": LIGHT}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("text")
    flags = ("--served-model-name", NAME, "--kv-cache-gib", "0.05")
    with serving(folder, *flags, served=str(checkpoint("qwen3"))) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=GUARD_S) as one:
        yield one


def conforms(text: str | None) -> None:
    light = json.loads(text or "")
    assert set(light) == {"on", "colour", "steps"}
    assert isinstance(light["on"], bool)
    assert light["colour"] in ("red", "blue")
    assert set(light["steps"]) <= {1, 2, 3}
    assert 2 <= len(light["steps"]) <= 3


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HI, max_tokens=12, **GREEDY)
    text = whole.choices[0].message.content
    assert text
    assert (whole.model, whole.choices[0].finish_reason) == (NAME, "length")
    assert whole.usage is not None
    usage: Any = None
    texts = ["", ""]
    for chunk in client.chat.completions.create(
        messages=HI,
        max_tokens=12,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [text, text]
    assert usage.completion_tokens == 2 * whole.usage.completion_tokens == 24
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_answers_of_one_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    def asked() -> list[str | None]:
        answer = client.chat.completions.create(
            model=NAME, messages=HI, max_tokens=8, n=3, seed=5, temperature=1.0
        )
        return [choice.message.content for choice in answer.choices]

    first = asked()
    assert len(set(first)) == 3
    assert asked() == first


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=HI, max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY
    )
    entries = (answer.choices[0].logprobs and answer.choices[0].logprobs.content) or []
    assert len(entries) == 6
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3
    spoken = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert spoken.decode(errors="replace") == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_binds_a_random_model(client: openai.OpenAI, stream: bool) -> None:
    """At full temperature, several times: by chance it would write no JSON at all."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "light", "schema": LIGHT}}
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": HI,
        "n": 4,
        "seed": 3,
        "temperature": 1.0,
        "max_tokens": 1500,
        "response_format": form,
    }
    texts = [""] * 4
    if stream:
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        for choice in client.chat.completions.create(**asked).choices:
            texts[choice.index] = choice.message.content or ""
    for text in texts:
        conforms(text)


def test_a_tool_is_called_as_it_is_described(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": HI,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 1500,
        "seed": 1,
    }
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "switch"
    conforms(call.function.arguments)
    arguments, names = "", set()
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            names |= {delta.function.name} - {None}
            arguments += delta.function.arguments or ""
    assert names == {"switch"}
    assert arguments == call.function.arguments


def test_completions_and_responses(client: openai.OpenAI) -> None:
    by_text = client.completions.create(prompt="red cat", max_tokens=6, n=2, **GREEDY)
    assert by_text.choices[0].text == by_text.choices[1].text != ""
    streamed = "".join(
        choice.text
        for chunk in client.completions.create(
            prompt="red cat", max_tokens=6, stream=True, **GREEDY
        )
        for choice in chunk.choices
    )
    assert streamed == by_text.choices[0].text
    chat = client.chat.completions.create(messages=HI, max_tokens=6, **GREEDY)
    answer = client.responses.create(input="hello", max_output_tokens=6, **GREEDY)
    assert answer.output_text == chat.choices[0].message.content
    kinds = [
        event.type
        for event in client.responses.create(
            input="hello", max_output_tokens=6, stream=True, **GREEDY
        )
    ]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds


def test_what_the_model_cannot_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="hello")
    with pytest.raises(openai.BadRequestError, match="speech"):
        client.audio.speech.create(model=NAME, voice="x", input="hello")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HI)


async def test_twenty_at_once_of_which_some_leave(server: Server) -> None:
    """Chats, completions, schemas and streams; six hang up in the middle. Nothing is left."""
    dice = random.Random(7)
    leaving = set(dice.sample(range(20), 6))
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="-", timeout=GUARD_S, max_retries=0
    ) as client:
        asked = [one_of_many(client, i, leaves=i in leaving) for i in range(20)]
        counts = await asyncio.gather(*asked)
        assert all(count >= 1 for count in counts)
        alone = await one_of_many(client, 1, leaves=False)
        assert alone == counts[1] or 1 in leaving
    await asyncio.to_thread(
        wait_until, lambda: server.replica()["requests"] == 0, "the server to be empty"
    )


async def one_of_many(client: openai.AsyncOpenAI, number: int, *, leaves: bool) -> int:
    """How many events or answers came before it left, or its end."""
    most: dict[str, Any] = {"model": NAME, "temperature": 1.0, "seed": number}
    endless: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"min_tokens": 1500}}
    if leaves or number % 4 == 0:
        length = endless if leaves else {"max_tokens": 30}
        stream = await client.chat.completions.create(messages=HI, stream=True, **length, **most)
        count = 0
        async for _ in stream:
            count += 1
            if leaves and count > number % 5:
                break
        await stream.close()
        return count
    if number % 4 == 1:
        return len((await client.completions.create(prompt=["a", "b"], **most)).choices)
    if number % 4 == 2:
        form: Any = {"type": "json_schema", "json_schema": {"name": "light", "schema": LIGHT}}
        answer = await client.chat.completions.create(
            messages=HI, response_format=form, max_tokens=1500, **most
        )
        conforms(answer.choices[0].message.content)
        return len(answer.choices)
    response = await client.responses.create(
        model=NAME, input="hello", max_output_tokens=9, temperature=1.0
    )
    return len(response.output)
