"""A tiny Qwen3 with random weights behind the real engine: every text route, one server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from omnistage.api.settings import ApiSettings
from omnistage.engine.async_omni import AsyncOmni
from tests.api.live_server import live_server
from tests.checkpoints import checkpoint

GUARD_S = 120.0
HI: Any = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx.AsyncClient]]:
    settings = {"served_model_name": "tiny", "process": "inline", "device": "cpu"}
    async with (
        AsyncOmni(str(checkpoint("qwen3")), **settings) as engine,
        live_server(engine, ApiSettings()) as url,  # type: ignore[arg-type]
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=GUARD_S) as client,
        httpx.AsyncClient(base_url=url, timeout=GUARD_S) as http,
    ):
        yield client, http


@pytest.mark.slow
@pytest.mark.invariant("ENTRY-INV-300")
async def test_every_route_of_a_served_model() -> None:
    async with asyncio.timeout(GUARD_S), served() as (client, http):
        whole = await client.chat.completions.create(messages=HI, max_tokens=12, **GREEDY)
        text = whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        stream = await client.chat.completions.create(
            messages=HI, max_tokens=12, stream=True, n=2, **GREEDY
        )
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [text, text]

        again = await client.chat.completions.create(
            messages=HI, max_tokens=12, logprobs=True, top_logprobs=3, **GREEDY
        )
        entries = (again.choices[0].logprobs and again.choices[0].logprobs.content) or []
        assert len(entries) == 12
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)

        named = await client.chat.completions.create(
            model="tiny", messages=HI, tools=[TOOL], tool_choice="required", max_tokens=60, seed=1
        )
        (call,) = named.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "f"
        assert set(json.loads(call.function.arguments)) == {"on"}

        tokens = (await http.post("/tokenize", json={"prompt": "hello"})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"] == "hello"
        by_text, by_ids = [
            await client.completions.create(prompt=prompt, max_tokens=6, logprobs=1, **GREEDY)
            for prompt in ("hello", tokens)
        ]
        assert by_text.choices[0].text == by_ids.choices[0].text

        answer = await client.responses.create(
            model="tiny",
            input="hello",
            max_output_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.output_text == text
        seeded = await client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=8, n=3, seed=5, temperature=1.0
        )
        assert len({choice.message.content for choice in seeded.choices}) == 3
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="tiny", prompt=[10**6])
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="tiny", prompt="hello " * 20_000)
        bad = {"model": "tiny", "messages": HI}
        for more in ({"guided_regex": "("}, {"guided_grammar": "start: nothing"}):
            response = await http.post("/v1/chat/completions", json={**bad, **more})
            assert response.status_code == 400, response.text
