"""Pictures as server-sent events, without a socket; `test_openai_client.py` reads them with one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from omnistage.api.protocol.images import ImageCompletedEvent, ImagePartialEvent
from omnistage.contracts.errors import OutOfMemoryError, OverloadedError
from tests.api.fake_engine import FakeEngine
from tests.api.pictures import open_base64, picture_file

GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"
STREAM = {"prompt": "a cat", "stream": True}


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event; comments are skipped, anything else fails."""
    found = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(": "):
            continue
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.invariant("ENTRY-INV-205")
@pytest.mark.parametrize(("image_format", "pillow"), [("png", "PNG"), ("webp", "WEBP")])
async def test_previews_come_in_order_and_then_the_finished_picture(
    client: httpx.AsyncClient, image_format: str, pillow: str
) -> None:
    body = {**STREAM, "partial_images": 3, "size": "40x24", "seed": 5, "quality": "hd"}
    response = await client.post(GENERATIONS, json={**body, "output_format": image_format})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *previews, (name, completed) = events(response.text)
    assert [kind for kind, _ in previews] == ["image_generation.partial_image"] * 3
    assert [data["partial_image_index"] for _, data in previews] == [0, 1, 2]
    assert name == "image_generation.completed"
    for kind, data in [*previews, (name, completed)]:
        picture = open_base64(data["b64_json"])
        assert (picture.size, picture.format, data["size"]) == ((40, 24), pillow, "40x24")
        assert data["type"] == kind
        assert (data["background"], data["quality"]) == ("auto", "high")
        assert data["output_format"] == image_format
        assert isinstance(data["created_at"], int)
    levels = [open_base64(data["b64_json"]).getpixel((0, 0)) for _, data in previews]
    assert levels == [(index,) * 3 for index in range(3)] or image_format == "webp"
    assert completed["seed"] == 5
    assert ": stage 0 step 1/2" in response.text
    assert "[DONE]" not in response.text


async def test_an_edit_streams_under_its_own_names(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.post(
        EDITS,
        data={"prompt": "x", "stream": "true", "partial_images": "1"},
        files=[("image", ("a.png", picture_file()))],
    )
    names = [name for name, _ in events(response.text)]
    assert names == ["image_edit.partial_image", "image_edit.completed"]
    assert engine.calls[0].params.partial_images == 1


@pytest.mark.invariant("ENTRY-INV-205")
async def test_each_of_several_pictures_has_its_events(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.post(GENERATIONS, json={**STREAM, "n": 2, "partial_images": 1})
    kinds = [(name.partition(".")[2], data["image_index"]) for name, data in events(response.text)]
    assert kinds == [("partial_image", 0), ("partial_image", 1), ("completed", 0), ("completed", 1)]
    assert engine.metrics.images == 2


@pytest.mark.invariant("ENTRY-INV-300")
async def test_events_are_what_the_openapi_document_describes(client: httpx.AsyncClient) -> None:
    response = await client.post(GENERATIONS, json={**STREAM, "partial_images": 1})
    (_, preview), (_, completed) = events(response.text)
    ImagePartialEvent.model_validate(preview)
    ImageCompletedEvent.model_validate(completed)


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
async def test_an_answer_in_one_piece_asks_for_no_previews(
    client: httpx.AsyncClient, engine: FakeEngine, stream: dict[str, Any]
) -> None:
    """Also where the deployment has a default: 0 is a value, None would be none."""
    response = await client.post(GENERATIONS, json={"prompt": "x", **stream})
    assert response.json()["data"]
    assert engine.calls[0].params.partial_images == 0


@pytest.mark.parametrize("asked", [{}, {"partial_images": 0}, {"partial_images": None}])
async def test_a_stream_without_previews_is_one_event(
    client: httpx.AsyncClient, asked: dict[str, Any]
) -> None:
    response = await client.post(GENERATIONS, json={**STREAM, **asked})
    assert [name for name, _ in events(response.text)] == ["image_generation.completed"]


@pytest.mark.invariant("ENTRY-INV-100")
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({**STREAM, "partial_images": 4}, "partial_images", "less than or equal to 3 (got 4)"),
        ({**STREAM, "partial_images": -1}, "partial_images", "greater than or equal to 0"),
        ({**STREAM, "partial_images": True}, "partial_images", "integer"),
        ({**STREAM, "partial_images": "2"}, "partial_images", "integer"),
        ({"prompt": "x", "partial_images": 2}, "partial_images", "needs stream: true"),
        ({"prompt": "x", "partial_images": 0, "stream": False}, "partial_images", "needs stream"),
        ({**STREAM, "response_format": "url"}, "response_format", "'b64_json'"),
    ],
)
async def test_what_cannot_be_streamed_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post(GENERATIONS, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert engine.calls == []


@pytest.mark.invariant("ENTRY-INV-100")
async def test_a_form_is_held_to_the_same_bounds(client: httpx.AsyncClient) -> None:
    files = [("image", ("a.png", picture_file()))]
    for fields, words in (
        ({"stream": "true", "partial_images": "4"}, "less than or equal to 3"),
        ({"stream": "true", "partial_images": "two"}, "integer"),
        ({"partial_images": "1"}, "needs stream: true"),
    ):
        response = await client.post(EDITS, data={"prompt": "x", **fields}, files=files)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]


@pytest.mark.invariant("ERR-INV-213")
async def test_a_failure_before_the_first_event_is_an_ordinary_answer(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error = OverloadedError("full", retry_after_s=2.2)
    response = await client.post(GENERATIONS, json=STREAM)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.headers["content-type"] == "application/json"


@pytest.mark.invariant("ERR-INV-213")
async def test_a_later_failure_is_one_last_event_named_error(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error = OutOfMemoryError("too large for this device")
    engine.error_after_progress = True
    response = await client.post(GENERATIONS, json={**STREAM, "partial_images": 1})
    (first, _), (name, data) = events(response.text)
    assert (first, name) == ("image_generation.partial_image", "error")
    assert data["type"] == "error"
    assert data["error"] == {
        "message": "too large for this device",
        "type": "out_of_memory",
        "param": None,
        "code": 503,
    }
    assert engine.metrics.requests[-1] == (GENERATIONS, "POST", 503)
