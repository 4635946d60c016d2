"""Malformed bodies by the thousand: they are the client's fault, every one, and never ours."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from omnistage.api.app import create_app
from omnistage.api.settings import ApiSettings
from tests.api.conftest import open_client
from tests.api.fake_engine import FakeEngine
from tests.api.fake_text_engine import FakeTextEngine
from tests.api.pictures import data_url, picture_file

pytestmark = [pytest.mark.slow, pytest.mark.invariant("ERR-INV-210")]

GENERATIONS = "/v1/images/generations"
CHAT = "/v1/chat/completions"
EDITS = "/v1/images/edits"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
SETTINGS = ApiSettings(max_pixels=64 * 64, max_input_pixels=64 * 64, max_body_bytes=200_000)
BODIES_A_ROUTE = 1500
BODIES_A_TEXT_ROUTE = 500
CHECKS = [
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
]

SEEDS: dict[str, Any] = {
    GENERATIONS: {"prompt": "a cat", "n": 1, "size": "16x16", "seed": 1, "guidance_scale": 2.0},
    CHAT: {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a cat"},
                    {"type": "image_url", "image_url": {"url": data_url(picture_file())}},
                ],
            }
        ],
        "modalities": ["image"],
        "extra_body": {"seed": 1},
        "stream": False,
    },
}

TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
KNOBS: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "stop": ["a"],
    "logit_bias": {"3": 1},
    "seed": 1,
    "min_tokens": 1,
    "stop_token_ids": [2],
}
TEXT_SEEDS: dict[str, Any] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "max_tokens": 5,
        "chat_template_kwargs": {"a": 1},
        **KNOBS,
    },
    COMPLETIONS: {
        "prompt": ["a", "b"],
        "logprobs": 1,
        "n": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        **KNOBS,
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"summary": None},
        **KNOBS,
    },
    TOKENIZE: {"prompt": "a", "add_special_tokens": True},
    DETOKENIZE: {"tokens": [1, 2]},
}

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    -(2**70),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "\x00",
    "\ud800",
    "\u202e\U0001f600",
    "x" * 40_000,
    "99999x99999",
    "data:image/png;base64,AAAA",
    "https://",
    "file:///etc/passwd",
    [],
    {},
    [[[[]]]],
    {"a": {"b": 1}},
    [None] * 300,
]


def mutate(source: random.Random, value: Any) -> Any:
    """`value` with one place made wrong."""
    if isinstance(value, dict) and value and source.random() < 0.85:
        changed = dict(value)
        key = source.choice(sorted(changed))
        match source.randrange(4):
            case 0:
                del changed[key]
            case 1:
                changed[key[:-1] + source.choice(["", "\x00", "x"])] = changed.pop(key)
            case _:
                changed[key] = mutate(source, changed[key])
        return changed
    if isinstance(value, list) and value and source.random() < 0.85:
        index = source.randrange(len(value))
        return [*value[:index], mutate(source, value[index]), *value[index + 1 :]]
    return source.choice(NASTY)


def damage(source: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(source.randrange(1, 8)):
        match source.randrange(3):
            case 0:
                data[source.randrange(len(data))] = source.randrange(256)
            case 1:
                start = source.randrange(len(data))
                del data[start : start + source.randrange(1, 20)]
            case 2:
                position = source.randrange(len(data) + 1)
                data[position:position] = source.choice([b"{", b'"', b"\xff", b"[" * 500, b"\r\n"])
        data = data or bytearray(b"{")
    return bytes(data)


def json_bodies(
    seed: dict[str, Any], path: str, count: int = BODIES_A_ROUTE, **more: Any
) -> Iterator[bytes]:
    source = random.Random(path)
    for number in range(count):
        body = json.dumps(mutate(source, seed | more)).encode()
        yield damage(source, body) if number % 3 == 0 else body


def form_bodies(**more: str) -> Iterator[bytes]:
    source = random.Random(EDITS)
    fields = {"prompt": "a cat", "n": "1", "size": "16x16", "seed": "1"} | more
    files = [("image", ("a.png", picture_file())), ("mask", ("m.png", picture_file("RGBA")))]
    request = httpx.Request("POST", "http://test", data=fields, files=files, headers=FORM)
    whole = request.read()
    for _ in range(BODIES_A_ROUTE):
        yield damage(source, whole)


FORM = {"content-type": "multipart/form-data; boundary=limit"}
JSON = {"content-type": "application/json"}


STREAMED = {"stream": True, "partial_images": 2, "response_format": "b64_json"}
STREAMED_FORM = {"stream": "true", "partial_images": "2", "response_format": "b64_json"}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (GENERATIONS, {}),
        (GENERATIONS, STREAMED),
        (CHAT, {}),
        (EDITS, {}),
        (EDITS, STREAMED_FORM),
    ],
)
async def test_damaged_bodies(
    path: str, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    bodies = form_bodies(**more) if path == EDITS else json_bodies(SEEDS[path], path, **more)
    await send_all(FakeEngine(), path, bodies, caplog)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TEXT_SEEDS)
async def test_damaged_bodies_of_texts(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"stream": True} if stream and path.startswith("/v1") else {}
    await send_all(
        text_engine(),
        path,
        json_bodies(TEXT_SEEDS[path], path, BODIES_A_TEXT_ROUTE, **more),
        caplog,
    )


def text_engine() -> FakeTextEngine:
    answers = {"tokens": [1], "max_model_len": 8, "token_strs": ["a"], "prompt": "a"}
    return FakeTextEngine(control_answers={"tokenize": answers, "detokenize": answers})


async def send_all(
    engine: FakeEngine, path: str, bodies: Iterator[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    statuses: Counter[int] = Counter()
    async with open_client(engine, SETTINGS) as client:
        with caplog.at_level(logging.ERROR):
            for body in bodies:
                headers = FORM if path == EDITS else JSON
                response = await client.post(path, content=body, headers=headers)
                statuses[response.status_code] += 1
                if response.status_code != 200:
                    assert 400 <= response.status_code < 500, (body, response.text)
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert caplog.records == []
    total = sum(statuses.values())
    assert total in (BODIES_A_ROUTE, BODIES_A_TEXT_ROUTE)
    assert statuses[400] > total / 3
    assert statuses[200] > 0


@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE, GenerationMode.POSITIVE])
@pytest.mark.parametrize("path", [GENERATIONS, CHAT, EDITS])
def test_bodies_made_from_the_schema(
    path: str, mode: GenerationMode, caplog: pytest.LogCaptureFixture
) -> None:
    send_generated(FakeEngine(), path, mode, caplog)


@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE, GenerationMode.POSITIVE])
@pytest.mark.parametrize("path", TEXT_SEEDS)
def test_bodies_of_texts_made_from_the_schema(
    path: str, mode: GenerationMode, caplog: pytest.LogCaptureFixture
) -> None:
    send_generated(text_engine(), path, mode, caplog)


def send_generated(
    engine: FakeEngine, path: str, mode: GenerationMode, caplog: pytest.LogCaptureFixture
) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(engine, SETTINGS))
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=100,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        response = case.call()
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1
        if mode is GenerationMode.NEGATIVE and path != EDITS:
            assert 400 <= response.status_code < 500, case.body

    with caplog.at_level(logging.ERROR):
        send()
    assert caplog.records == []
    assert sum(statuses.values()) >= 100
    assert set(statuses) <= {200, 400, 404, 413}
