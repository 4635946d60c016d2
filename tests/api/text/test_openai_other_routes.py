"""Completions, responses and errors as the `openai` package sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.responses import Response

from omnistage.contracts.outputs import FinishReason
from tests.api.fake_text_engine import TEXT_MODEL, FakeTextEngine, too_long
from tests.api.text.test_openai_text import (
    CALL,
    HI,
    STREAM_EVENT,
    TOOL,
    openai_client,
    strict,
    with_template,
)

pytestmark = pytest.mark.invariant("ENTRY-INV-300")


async def test_completions_of_several_prompts() -> None:
    engine = FakeTextEngine(script=lambda prompt, child: [str(prompt["prompt"]), "!"])
    async with openai_client(engine) as client:
        whole = await client.completions.create(
            model=TEXT_MODEL, prompt=["a", "b"], n=2, logprobs=1, max_tokens=4
        )
        echoed = await client.completions.create(model=TEXT_MODEL, prompt="a", echo=True)
        stream = await client.completions.create(
            model=TEXT_MODEL,
            prompt=["a", "b"],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    strict(Completion, whole)
    assert [(c.index, c.text) for c in whole.choices] == [
        (0, "a!"),
        (1, "a!"),
        (2, "b!"),
        (3, "b!"),
    ]
    logprobs = whole.choices[2].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["b", "!"], [0, 1])
    assert logprobs.top_logprobs is not None
    assert set(logprobs.top_logprobs[0]) == {"b", "other"}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (14, 8)
    assert echoed.choices[0].text == "aa!"
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "a!", 1: "b!"}
    assert chunks[-1].usage is not None


async def test_completions_of_token_ids() -> None:
    engine = FakeTextEngine()
    async with openai_client(engine) as client:
        await client.completions.create(model=TEXT_MODEL, prompt=[1, 2])
        await client.completions.create(model=TEXT_MODEL, prompt=[[3], [4, 5]])
    assert [call.prompt["prompt_token_ids"] for call in engine.text_calls] == [[1, 2], [3], [4, 5]]


async def test_responses_whole_and_streamed(tmp_path: Path) -> None:
    engine = FakeTextEngine(
        script=lambda prompt, child: ["<think>hm", "</think>", "Wait.", *CALL],
        model_path=with_template(tmp_path),
    )
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    request: dict[str, Any] = {
        "model": TEXT_MODEL,
        "input": "hi",
        "instructions": "be kind",
        "tools": [tool],
        "max_output_tokens": 50,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "metadata": {"a": "b"},
    }
    async with openai_client(engine) as client:
        whole = await client.responses.create(**request)
        events = [event async for event in await client.responses.create(**request, stream=True)]
    strict(Response, whole)
    assert whole.output_text == "Wait."
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call"]
    assert whole.output[2].arguments == '{"city": "Paris"}'  # type: ignore[union-attr]
    assert whole.metadata == {"a": "b"}
    assert engine.text_calls[0].prompt["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]
    assert engine.text_calls[0].writer.max_tokens == 50
    for number, event in enumerate(events):
        STREAM_EVENT.validate_python(event.to_dict(), strict=True)
        assert event.sequence_number == number
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert names.count("response.output_item.done") == 3
    final = events[-1].response  # type: ignore[union-attr]
    assert [item.type for item in final.output] == kinds
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Wait."


async def test_responses_take_a_whole_history() -> None:
    engine = FakeTextEngine(finish=FinishReason.LENGTH)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "wet", "annotations": []}],
        },
        {"role": "user", "content": "and now?"},
    ]
    async with openai_client(engine) as client:
        answer = await client.responses.create(model=TEXT_MODEL, input=items, store=False)
    strict(Response, answer)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    user, thought, tool, assistant, last = engine.text_calls[0].prompt["messages"]
    assert (user["content"], last["content"]) == ("weather?", "and now?")
    assert thought["reasoning_content"] == "hm"
    assert thought["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}
    assert (tool["content"], assistant["content"]) == ("rain", "wet")


async def test_errors_arrive_as_its_own() -> None:
    engine = FakeTextEngine(script=too_long)
    async with openai_client(engine) as client:
        with pytest.raises(openai.BadRequestError, match="4096"):
            await client.chat.completions.create(model=TEXT_MODEL, messages=HI)
        with pytest.raises(openai.BadRequestError, match="stores nothing"):
            await client.responses.create(model=TEXT_MODEL, input="x", previous_response_id="r")
        with pytest.raises(openai.BadRequestError, match=r"store: .*stores nothing"):
            await client.responses.create(model=TEXT_MODEL, input="x", store=True)
