from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.api.conftest import open_client
from tests.api.fake_text_engine import CACHED_TOKENS, PROMPT_TOKENS, FakeTextEngine

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def engine() -> FakeTextEngine:
    return FakeTextEngine()


@pytest.fixture
async def client(engine: FakeTextEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(engine) as opened:
        yield opened


def data_events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data:")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.invariant("ENTRY-INV-234")
async def test_an_answer_in_one_piece(client: httpx.AsyncClient, engine: FakeTextEngine) -> None:
    response = await client.post(CHAT, json={**HELLO, "n": 2})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["message"]["content"] == "Hello world!"
        assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert answer["usage"] == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 8,
        "total_tokens": PROMPT_TOKENS + 8,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }
    (call,) = engine.text_calls
    assert call.prompt == {"messages": [{"role": "user", "content": "hi"}]}
    assert call.writer.delta is False


async def test_a_stream(client: httpx.AsyncClient, engine: FakeTextEngine) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(CHAT, json=body)
    *chunks, last = data_events(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello world!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert engine.text_calls[0].writer.delta is True
