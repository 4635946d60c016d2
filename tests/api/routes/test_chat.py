from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import OutOfMemoryError, OverloadedError
from tests.api.conftest import open_client
from tests.api.fake_engine import MODEL, FakeEngine
from tests.api.pictures import data_url, open_data_url, picture_file

CHAT = "/v1/chat/completions"


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


HELLO = {"messages": [user(text("a cat"))]}


async def test_the_answer_is_one_choice_a_picture(client: httpx.AsyncClient) -> None:
    body = {**HELLO, "n": 2, "size": "24x16", "modalities": ["text", "image"], "model": MODEL}
    answer = (await client.post(CHAT, json=body)).json()
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        (part,) = choice["message"]["content"]
        assert open_data_url(part["image_url"]["url"]).size == (24, 16)
        assert choice["finish_reason"] == "stop"


async def test_the_last_user_turn_is_the_prompt_and_the_input(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    url = data_url(picture_file(size=(5, 4)))
    messages = [
        {"role": "system", "content": "be brief"},
        user(text("old"), image(url)),
        {"role": "assistant", "content": [image(url)], "refusal": None},
        user(text("make it"), image(url), text("blue"), image(url)),
    ]
    response = await client.post(CHAT, json={"messages": messages})
    assert response.status_code == 200, response.text
    prompt = engine.calls[0].prompt
    assert prompt["prompt"] == "make it\nblue"
    assert [picture.size for picture in prompt["multi_modal_data"]["image"]] == [(5, 4)] * 2


@pytest.mark.parametrize("nested", [False, True])
async def test_knobs_at_the_top_level_or_in_extra_body(
    client: httpx.AsyncClient, engine: FakeEngine, nested: bool
) -> None:
    knobs = {
        "num_inference_steps": 6,
        "guidance_scale": 2.0,
        "true_cfg_scale": 3.0,
        "seed": 9,
        "negative_prompt": "dogs",
        "width": 40,
        "height": 24,
        "num_outputs_per_prompt": 2,
        "strength": 0.25,
    }
    body = {**HELLO, "extra_body": knobs} if nested else {**HELLO, **knobs}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    (call,) = engine.calls
    params = call.params
    assert call.prompt["negative_prompt"] == "dogs"
    assert (params.num_inference_steps, params.seed) == (6, 9)
    assert (params.guidance_scale, params.true_cfg_scale, params.strength) == (2.0, 3.0, 0.25)
    assert (params.width, params.height, params.num_outputs_per_prompt) == (40, 24, 2)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({**HELLO, "temperature": 1}, "temperature", "leave it out"),
        ({**HELLO, "modalites": ["image"]}, "modalites", "did you mean 'modalities'?"),
        ({**HELLO, "modalities": ["text"]}, "modalities", "makes images"),
        ({**HELLO, "modalities": ["image", "audio"]}, "modalities", "makes images"),
        ({**HELLO, "seed": 1, "extra_body": {"seed": 2}}, "seed", "once"),
        ({**HELLO, "extra_body": {"sead": 2}}, "sead", "did you mean 'seed'?"),
        ({**HELLO, "extra_body": 3}, "extra_body", "an object"),
        ({**HELLO, "n": 1, "num_outputs_per_prompt": 1}, "n", "give one"),
        ({**HELLO, "width": 8}, "height", "both sides"),
        ({**HELLO, "width": 8, "height": 8, "size": "8x8"}, "size", "either"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "no user message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "a list of parts"),
        ({"messages": [user()]}, "messages[0].content", "no text"),
        ({"messages": [user({"type": "file"})]}, "messages[0].content[0]", "image_url"),
        (
            {"messages": [user(text("x"), {"type": "image_url", "image_url": {"ulr": "x"}})]},
            "messages[0].content[1].image_url.ulr",
            "did you mean 'url'?",
        ),
        (
            {"messages": [user(text("x"), image("ftp://example.org/a.png"))]},
            "messages[0].content[1].image_url.url",
            "https",
        ),
    ],
)
async def test_a_wrong_body_names_the_path(
    client: httpx.AsyncClient, engine: FakeEngine, body: object, param: str, words: str
) -> None:
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert engine.calls == []


@pytest.mark.invariant("ENTRY-INV-103")
async def test_limits_hold_for_chat_too() -> None:
    url = data_url(picture_file(size=(20, 20)))
    settings = ApiSettings(max_n=1, max_pixels=64, max_input_images=1, max_input_pixels=100)
    async with open_client(FakeEngine(), settings) as client:
        for body, param in [
            ({**HELLO, "n": 2}, "n"),
            ({**HELLO, "width": 9, "height": 8}, "size"),
            (
                {"messages": [user(text("x"), image(url), image(url))]},
                "messages[0].content[1].image_url.url",
            ),
            ({"messages": [user(text("x"), image(url))]}, "messages[0].content[1].image_url.url"),
        ]:
            response = await client.post(CHAT, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


def events(body: str) -> list[str]:
    return [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]


@pytest.mark.invariant("ENTRY-INV-101")
async def test_a_stream_ends_with_done_and_keeps_identity_and_modality(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post(CHAT, json={**HELLO, "stream": True, "n": 2})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert [chunk["choices"][0]["index"] for chunk in parsed] == [0, 1]
    assert {chunk["modality"] for chunk in parsed} == {"image"}
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in parsed} == {f"chatcmpl-{response.headers['x-request-id']}"}
    (part,) = parsed[0]["choices"][0]["delta"]["content"]
    open_data_url(part["image_url"]["url"])
    assert ": stage 0 step 1/2" in response.text


@pytest.mark.invariant("ERR-INV-213")
async def test_a_failure_before_the_first_event_has_its_own_status(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error = OverloadedError("full", retry_after_s=2.2)
    response = await client.post(CHAT, json={**HELLO, "stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"


@pytest.mark.invariant("ERR-INV-213")
async def test_a_later_failure_is_one_last_event_without_done(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error = OutOfMemoryError("too large for this device")
    engine.error_after_progress = True
    response = await client.post(CHAT, json={**HELLO, "stream": True})
    (event,) = events(response.text)
    assert json.loads(event)["error"] == {
        "message": "too large for this device",
        "type": "out_of_memory",
        "param": None,
        "code": 503,
    }
    assert engine.metrics.requests[-1] == (CHAT, "POST", 503)
