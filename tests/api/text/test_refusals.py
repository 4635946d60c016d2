"""What cannot be served is refused by name, before the engine is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import InvalidRequestError, OutOfMemoryError
from tests.api.conftest import open_client
from tests.api.fake_engine import FakeEngine
from tests.api.fake_text_engine import FakeTextEngine
from tests.api.pictures import data_url, picture_file

pytestmark = pytest.mark.invariant("ENTRY-INV-231")

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "g"}}
PICTURE = {"type": "image_url", "image_url": {"url": data_url(picture_file())}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "midi"}}


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.fixture
async def engine() -> FakeTextEngine:
    return FakeTextEngine()


@pytest.fixture
async def client(engine: FakeTextEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(engine) as opened:
        yield opened


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({**HI, "stop": ["x"] * 10_000}, "stop", "64"),
        ({**HI, "stop": [""]}, "stop", "at least 1 character"),
        ({**HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({**HI, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({**HI, "temperature": 2.5}, "temperature", "2"),
        ({**HI, "top_p": 0}, "top_p", "greater than 0"),
        ({**HI, "temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({**HI, "web_search_options": {}}, "web_search_options", "not offered"),
        ({**HI, "functions": []}, "functions", "not offered"),
        ({**HI, "store": True}, "store", "False"),
        ({**HI, "n": 129}, "n", "128"),
        ({**HI, "logit_bias": {"x": 1}}, "logit_bias", "pattern"),
        ({**HI, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        ({**HI, "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({**HI, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one"),
        ({**HI, "min_tokens": 5, "max_tokens": 3}, "min_tokens", "max_tokens 3"),
        ({**HI, "modalities": ["audio"]}, "modalities", "available: text"),
        ({**HI, "audio": {"voice": "x"}}, "audio", "modalities"),
        ({**HI, "tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({**HI, "tools": [TOOL, TOOL], "tool_choice": "required"}, "tools", "twice"),
        ({**HI, "tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "none of the tools: f"),
        ({**HI, "tools": [TOOL]}, "tools", "--tool-call-parser"),
        ({**HI, "reasoning_effort": "high"}, "reasoning_effort", "knows none"),
        ({**HI, "continue_final_message": True}, "continue_final_message", "'assistant'"),
        (
            {**HI, "response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "give one",
        ),
        ({**HI, "structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({**HI, "guided_json": "{"}, None, "no JSON"),
        ({**HI, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({**HI, "sampling_params_list": [{}, {}]}, "sampling_params_list", "1 stages"),
        ({**HI, "sampling_params_list": [{"top_q": 1}]}, "sampling_params_list[0]", "top_q"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "needs content"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]},
            "messages[0].tool_call_id",
            "role 'tool'",
        ),
        (
            {"messages": [{"role": "assistant", "audio": {"id": "a"}}]},
            "messages[0].audio",
            "transcript",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "c",
                                "type": "function",
                                "function": {"name": "f", "arguments": "["},
                            }
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "no JSON",
        ),
        (user(PICTURE), "messages[0].content[0].image_url.url", "takes text, not image"),
        (user({"type": "file"}), "messages[0].content[0]", "video_url"),
    ],
)
async def test_a_wrong_chat_is_refused_by_name(
    client: httpx.AsyncClient,
    engine: FakeTextEngine,
    body: dict[str, Any],
    param: str | None,
    words: str,
) -> None:
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"] == param or (error["param"] or "").startswith((f"{param}[", f"{param}."))
    assert engine.text_calls == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "min_p"])
async def test_no_number_is_no_number(client: httpx.AsyncClient, field: str, number: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {number}}}'
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]", "integer"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0]", "0"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not offered"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "echo": True}, "echo", "leave one"),
        (COMPLETIONS, {"prompt": [1], "echo": True}, "echo", "/detokenize"),
        (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "n", "128"),
        (RESPONSES, {"input": "a", "conversation": "c"}, "conversation", "stores nothing"),
        (RESPONSES, {"input": [{"type": "file_search_call"}]}, "input[0]", "function_call_output"),
        (RESPONSES, {"input": "a", "max_tokens": 3}, "max_tokens", "null"),
        (RESPONSES, {"input": "a", "top_logprobs": 3}, "top_logprobs", "include"),
        (RESPONSES, {"input": "a", "include": ["x"]}, "include[0]", "logprobs"),
        (RESPONSES, {"input": "a", "truncation": "auto"}, "truncation", "disabled"),
        (
            RESPONSES,
            {
                "instructions": "x",
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": PICTURE["image_url"]["url"]}  # type: ignore[index]
                        ],
                    }
                ],
            },
            "input[0].content[0].image_url.url",
            "not image",
        ),
        ("/tokenize", {}, "prompt", "either"),
        ("/tokenize", {"prompt": "a", "messages": HI["messages"]}, "prompt", "either"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "0"),
    ],
)
async def test_other_wrong_bodies_are_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error


async def test_a_sound_of_an_unknown_format() -> None:
    async with open_client(FakeTextEngine(speaks=True)) as client:
        error = (await client.post(CHAT, json=user(SOUND))).json()["error"]
    assert error["param"] == "messages[0].content[0].input_audio.format"
    assert "midi" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, "/tokenize", "/detokenize"])
async def test_a_model_without_text_says_so(path: str) -> None:
    body = {
        COMPLETIONS: {"prompt": "a"},
        RESPONSES: {"input": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }[path]
    async with open_client(FakeEngine()) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert "writes no text" in response.json()["error"]["message"]


async def test_a_failure_in_a_stream_is_its_last_event() -> None:
    engine = FakeTextEngine()
    engine.error, engine.error_after_progress = OutOfMemoryError("too much"), True
    async with open_client(engine) as client:
        for path, body in ((CHAT, HI), (COMPLETIONS, {"prompt": ["a", "b"]})):
            response = await client.post(path, json={**body, "stream": True})
            assert response.status_code == 200
            assert "[DONE]" not in response.text
            assert '"out_of_memory"' in response.text.strip().splitlines()[-1]
        assert engine.active == set()


async def test_one_bad_prompt_of_several_ends_the_others() -> None:
    def script(prompt: dict[str, Any], child: int) -> list[str]:
        if prompt["prompt"] == "bad":
            raise InvalidRequestError("bad prompt", param="prompt")
        return ["a"] * 3

    engine = FakeTextEngine(script=script)
    engine.hold.clear()
    async with open_client(engine) as client:
        response = await client.post(COMPLETIONS, json={"prompt": ["good", "bad"]})
    assert response.status_code == 400
    assert engine.active == set()
    assert len(engine.aborted_ids) == 1


@pytest.mark.invariant("ENTRY-INV-104")
async def test_keys_guard_what_works_for_a_caller() -> None:
    async with open_client(FakeTextEngine(), ApiSettings(api_keys=("key",))) as client:
        for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize"):
            assert (await client.post(path, json={})).status_code == 401


async def test_tokens_are_asked_of_the_stage() -> None:
    engine = FakeTextEngine(
        control_answers={
            "tokenize": {
                "tokens": [1, 2],
                "count": 2,
                "max_model_len": 64,
                "token_strs": list("ab"),
            },
            "detokenize": {"prompt": "ab"},
        }
    )
    async with open_client(engine) as client:
        plain = (await client.post("/tokenize", json={"prompt": "ab"})).json()
        chat = {**HI, "add_generation_prompt": True, "return_token_strs": True}
        strings = (await client.post("/tokenize", json=chat)).json()
        text = (await client.post("/detokenize", json={"tokens": [1, 2]})).json()
    assert plain == {"count": 2, "max_model_len": 64, "tokens": [1, 2], "token_strs": None}
    assert strings["token_strs"] == ["a", "b"]
    assert text == {"prompt": "ab"}
    assert engine.controls == [
        ("tokenize", {"prompt": "ab"}),
        ("tokenize", {"messages": HI["messages"], "add_generation_prompt": True}),
        ("detokenize", {"tokens": [1, 2]}),
    ]


async def test_sampling_parameters_a_stage_and_knobs_above_them(tmp_path: Path) -> None:
    engine = FakeTextEngine(speaks=True)
    stages = [{"temperature": 0.5, "top_k": 3}, {"max_tokens": 7}, {}]
    async with open_client(engine) as client:
        body = {**HI, "sampling_params_list": stages, "temperature": 0}
        assert (await client.post(CHAT, json=body)).status_code == 200
    writer, talker, _ = engine.text_calls[0].params
    assert (writer.temperature, writer.top_k, talker.max_tokens) == (0, 3, 7)  # type: ignore[union-attr]
