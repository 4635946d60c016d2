"""What people and fuzzers send to a model that hears, looks and speaks: refused with the limit or
the fault named, never a failure of the server, which serves on."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omnistage.api.audio_encode import encode_audio
from omnistage.api.settings import ApiSettings
from tests.api.sounds import RATE_HZ, data_url
from tests.e2e.token_serving import CHAT, COMPLETIONS, SPEECH, Served, said, serving

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RESPONSES, TOKENIZE, DETOKENIZE = "/v1/responses", "/tokenize", "/detokenize"
SILENCE_S = 600
HI: dict[str, Any] = {"messages": said(), "max_tokens": 2}
PICTURE_OF_NOTHING = data_url(b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "image/png")
NO_VIDEO = data_url(b"this is no video, whatever its type says" * 20, "video/mp4")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def omni() -> AsyncIterator[Served]:
    settings = ApiSettings(tool_call_parser="hermes")
    async with serving("qwen3-omni", settings, process="stages") as running:
        yield running


def chat(**fields: Any) -> dict[str, Any]:
    return {**HI, **fields}


def with_part(part: dict[str, Any]) -> dict[str, Any]:
    return chat(messages=said([{"type": "text", "text": "hello"}, part]))


def url_part(kind: str, url: str) -> dict[str, Any]:
    return with_part({"type": f"{kind}_url", f"{kind}_url": {"url": url}})


def sound(data: str, audio_format: str = "wav") -> dict[str, Any]:
    return with_part({"type": "input_audio", "input_audio": {"data": data, "format": audio_format}})


def silent_file() -> str:
    samples = np.zeros(SILENCE_S * RATE_HZ, np.float32)
    return base64.b64encode(encode_audio(samples, RATE_HZ, "flac")).decode()


def schema(content: Any) -> dict[str, Any]:
    return chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": content}}
    )


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def wide(count: int) -> dict[str, Any]:
    names = [f"field_{i}" for i in range(count)]
    return {
        "type": "object",
        "properties": {name: {"type": "string", "enum": names[:50]} for name in names},
        "required": names,
    }


CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "a prompt that is too long": (chat(messages=said("robot " * 6000)), "4096"),
    "more to say than fits": (chat(max_tokens=2**31 - 1), "4096"),
    "no messages": (chat(messages=[]), "at least 1"),
    "too many messages": (chat(messages=said() * 1001), "1000"),
    "an unknown role": (chat(messages=[{"role": "robot", "content": "x"}]), "'robot'"),
    "messages that are text": (chat(messages="hello"), "array"),
    "broken base64": (sound("$$$not base64$$$"), "base64"),
    "base64 of nothing": (sound(base64.b64encode(b"nothing").decode()), "audio"),
    "an unknown format": (sound("AAAA", "midi"), "midi"),
    "a video that is not one": (url_part("video", NO_VIDEO), "video"),
    "a picture that is not one": (url_part("image", PICTURE_OF_NOTHING), "image"),
    "a data URL without data": (url_part("image", "data:image/png;base64,"), "image_url"),
    "a file of the server's": (url_part("image", "file:///etc/passwd"), "file"),
    "an address inside": (url_part("audio", "https://127.0.0.1:1/a.wav"), "127.0.0.1"),
    "ten minutes of silence": ({"silence": True}, "300"),
    "10,000 stop strings": (chat(stop=["x"] * 10_000), "64"),
    "a stop string too long": (chat(stop="x" * 2000), "1024"),
    "more answers than allowed": (chat(n=10_000), "128"),
    "huge n": (chat(n=10**12), "10000"),
    "negative n": (chat(n=-1), "n"),
    "a bias on no token of the vocabulary": (chat(logit_bias={"999999": 5}), "0 to 558"),
    "a bias that is none": (chat(logit_bias={"1": 1000}), "100"),
    "a stop token of no vocabulary": (chat(stop_token_ids=[2**31 - 1]), "0 to 558"),
    "a schema of no type": (schema({"type": "strnig"}), "strnig"),
    "a schema that points nowhere": (schema({"$ref": "#/$defs/none"}), "none"),
    "a schema of contradictions": (
        schema({"type": "object", "required": 3, "properties": []}),
        "properties must be an object",
    ),
    "a schema without end": (schema(deep(300)), ""),
    "a schema as wide as a book": (schema(wide(20_000)), ""),
    "a regular expression without end": (chat(guided_regex="(a|b)*" * 5000 + "c{1,99999}"), ""),
    "a broken regular expression": (chat(guided_regex="("), "regex"),
    "a grammar that is none": (chat(guided_grammar="start: nothing"), "nothing"),
    "two tools of one name": (chat(tools=[TOOL, TOOL], tool_choice="required"), "twice"),
    "a tool of no schema": (
        chat(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}],
            tool_choice="required",
        ),
        "type must be",
    ),
    "too many tools": (chat(tools=[TOOL] * 129), "128"),
    "speech in no voice": (
        chat(modalities=["text", "audio"], audio={"voice": "nobody", "format": "wav"}),
        "nobody",
    ),
    "a modality that is none": (chat(modalities=["smell"]), "audio"),
    "template arguments that are a list": (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    "processor arguments that exist nowhere": (
        chat(mm_processor_kwargs={"no_such_argument": 1}),
        "no_such_argument",
    ),
    "parameters for stages that are not": (chat(sampling_params_list=[{}] * 9), "3 stages"),
    "a talker's temperature of text": (
        chat(sampling_params_list=[{}, {"temperature": "hot"}, {}]),
        "temperature",
    ),
    "a talker's negative temperature": (
        chat(modalities=["text", "audio"], sampling_params_list=[{}, {"temperature": -1.0}, {}]),
        "temperature",
    ),
    "a talker that stops at text": (
        chat(modalities=["text", "audio"], sampling_params_list=[{}, {"stop": ["x"]}, {}]),
        "stop",
    ),
    "logprobs beyond the bound": (chat(logprobs=True, top_logprobs=21), "20"),
}


@pytest.mark.parametrize("name", CHATS)
async def test_a_bad_chat_is_refused(omni: Served, name: str) -> None:
    body, words = CHATS[name]
    if body.pop("silence", False):
        body = sound(silent_file(), "flac")
    for more in ({}, {"stream": True}):
        await assert_refused(omni, CHAT, body | more, words)


WRONG_TYPES: dict[str, Any] = {"text": "x", "list": [[]], "object": {"a": 1}, "flag": True}
FIELDS_OF_NUMBERS = (
    "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n", "top_logprobs",
    "priority",
)  # fmt: skip
FIELDS_OF_OBJECTS = (
    "logit_bias", "response_format", "structured_outputs", "stream_options", "audio",
    "chat_template_kwargs", "mm_processor_kwargs", "metadata",
)  # fmt: skip
FIELDS_OF_LISTS = ("tools", "modalities", "stop_token_ids", "sampling_params_list", "messages")


@pytest.mark.parametrize("kind", WRONG_TYPES)
async def test_no_field_takes_a_value_of_another_type(omni: Served, kind: str) -> None:
    right = {"object": FIELDS_OF_OBJECTS}.get(kind, ())
    for name in (*FIELDS_OF_NUMBERS, *FIELDS_OF_OBJECTS, *FIELDS_OF_LISTS):
        if name not in right:
            await assert_refused(omni, CHAT, chat(**{name: WRONG_TYPES[kind]}), name.split("_")[0])
    for name in FIELDS_OF_OBJECTS:
        await assert_refused(omni, CHAT, chat(**{name: 5}), name)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "frequency_penalty"])
async def test_what_is_no_number_is_refused(omni: Served, field: str, value: str) -> None:
    raw = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
    answer = await omni.http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert field in answer.text


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ids beyond the vocabulary": (COMPLETIONS, {"prompt": [10**6]}, "1000000"),
    "a negative id": (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    "no prompt": (COMPLETIONS, {"prompt": ""}, "prompt"),
    "a list of no ids": (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    "too long": (COMPLETIONS, {"prompt": [1] * 5000}, "4096"),
    "too many prompts": (COMPLETIONS, {"prompt": ["a"] * 2000}, "1024"),
    "a response to nothing": (RESPONSES, {"input": []}, "input"),
    "a response of a store": (RESPONSES, {"input": "a", "previous_response_id": "r"}, "store"),
    "an unknown voice": (SPEECH, {"input": "Hi.", "voice": "nobody"}, "nobody"),
    "nothing to say": (SPEECH, {"input": "  "}, "nothing to say"),
    "a speech": (SPEECH, {"input": "a" * 5000}, "4096"),
    "no speed": (SPEECH, {"input": "Hi.", "speed": 0}, "speed"),
    "a format that is none": (SPEECH, {"input": "Hi.", "response_format": "midi"}, "mp3"),
    "a model that is not": (CHAT, {**HI, "model": "gpt-9"}, "gpt-9"),
    "tokens beyond the vocabulary": (DETOKENIZE, {"tokens": [2**31 - 1]}, "2147483647"),
    "tokens of text": (DETOKENIZE, {"tokens": ["a"]}, "tokens"),
    "an embedding": ("/v1/embeddings", {"input": "a"}, "embeddings"),
}


@pytest.mark.parametrize("name", OTHERS)
async def test_other_bad_bodies_are_refused(omni: Served, name: str) -> None:
    path, body, words = OTHERS[name]
    await assert_refused(omni, path, body, words)


async def test_it_serves_on(omni: Served) -> None:
    """After everything above nothing is held, every process is the first one, and it answers."""
    await omni.until_free()
    pool = omni.engine._running().supervisor.pools[0]
    assert omni.engine.health().live
    assert pool.replicas[0].state == "ready"
    answer = await omni.http.post(CHAT, json=HI)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2


async def assert_refused(omni: Served, path: str, body: Any, words: str) -> None:
    answer = await omni.http.post(path, json=body)
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:600])
    message = answer.json()["error"]["message"]
    assert words.lower() in f"{message} {answer.json()['error']['param']}".lower(), message
    assert len(message) < 2000
