"""The `openai` package, unmodified, against the application on a real socket."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types import (
    ImageEditCompletedEvent,
    ImageEditPartialImageEvent,
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
)

from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import OutOfMemoryError, OverloadedError
from tests.api.fake_engine import MODEL, FakeEngine
from tests.api.live_server import GUARD_S, live_server
from tests.api.pictures import data_url, open_base64, open_data_url, picture_file

pytestmark = pytest.mark.invariant("ENTRY-INV-300")


@asynccontextmanager
async def openai_client(engine: FakeEngine, key: str = "key") -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        live_server(engine, ApiSettings(api_keys=("key",))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30) as client,
    ):
        yield client


async def test_generate() -> None:
    engine = FakeEngine()
    async with openai_client(engine) as client:
        answer = await client.images.generate(
            model=MODEL,
            prompt="a cat",
            n=2,
            size="1024x1024",
            output_format="jpeg",
            output_compression=80,
            quality="high",
            extra_body={"seed": 4, "num_inference_steps": 3, "true_cfg_scale": 2.5},
        )
    assert answer.data is not None
    assert [open_base64(item.b64_json or "").size for item in answer.data] == [(1024, 1024)] * 2
    assert (answer.output_format, answer.size) == ("jpeg", "1024x1024")
    params = engine.calls[0].params
    assert (params.seed, params.num_inference_steps, params.true_cfg_scale) == (4, 3, 2.5)


async def test_edit_one_picture_with_a_mask_and_several_without() -> None:
    engine = FakeEngine()
    async with openai_client(engine) as client:
        answer = await client.images.edit(
            model=MODEL,
            prompt="make it blue",
            image=("a.png", picture_file()),
            mask=("m.png", picture_file("RGBA", colour=(0, 0, 0, 0))),
            n=1,
        )
        await client.images.edit(
            prompt="join them",
            image=[("a.png", picture_file()), ("b.png", picture_file(size=(5, 5)))],
            extra_body={"guidance_scale": 3.5},
        )
    assert answer.data is not None
    open_base64(answer.data[0].b64_json or "")
    first, second = engine.calls
    assert set(first.prompt["multi_modal_data"]) == {"image", "mask"}
    assert [p.size for p in second.prompt["multi_modal_data"]["image"]] == [(16, 12), (5, 5)]
    assert second.params.guidance_scale == 3.5


async def test_generate_as_a_stream() -> None:
    engine = FakeEngine()
    async with openai_client(engine) as client:
        stream = await client.images.generate(
            model=MODEL,
            prompt="a cat",
            stream=True,
            partial_images=2,
            size="1024x1024",
            output_format="jpeg",
            quality="high",
            background="opaque",
        )
        first, second, completed = [event async for event in stream]
    for index, event in enumerate((first, second)):
        ImageGenPartialImageEvent.model_validate(event.to_dict(), strict=True)
        assert event.type == "image_generation.partial_image"
        assert event.partial_image_index == index
        assert open_base64(event.b64_json).size == (1024, 1024)
    ImageGenCompletedEvent.model_validate(completed.to_dict(), strict=True)
    assert completed.type == "image_generation.completed"
    assert (completed.quality, completed.background) == ("high", "opaque")
    assert (completed.size, completed.output_format) == ("1024x1024", "jpeg")
    assert open_base64(completed.b64_json).format == "JPEG"
    assert engine.calls[0].params.partial_images == 2


async def test_edit_as_a_stream() -> None:
    async with openai_client(FakeEngine()) as client:
        stream = await client.images.edit(
            prompt="make it blue",
            image=("a.png", picture_file()),
            stream=True,
            partial_images=1,
        )
        preview, completed = [event async for event in stream]
    ImageEditPartialImageEvent.model_validate(preview.to_dict(), strict=True)
    ImageEditCompletedEvent.model_validate(completed.to_dict(), strict=True)
    assert completed.type == "image_edit.completed"


async def test_errors_of_a_stream_are_raised_before_and_after_its_first_event() -> None:
    engine = FakeEngine(error=OutOfMemoryError("too large"))
    async with openai_client(engine) as client:
        with pytest.raises(openai.InternalServerError):
            await client.images.generate(prompt="x", stream=True, partial_images=1)
        engine.error_after_progress = True
        stream = await client.images.generate(prompt="x", stream=True, partial_images=1)
        assert (await anext(stream)).type == "image_generation.partial_image"
        with pytest.raises(openai.APIError, match="too large") as failed:
            await anext(stream)
    assert failed.value.type == "out_of_memory"


async def test_closing_a_stream_aborts_the_request() -> None:
    engine = FakeEngine()
    engine.hold.clear()
    async with openai_client(engine) as client:
        stream = await client.images.generate(prompt="x", stream=True, partial_images=1)
        await anext(stream)
        await stream.close()
        async with asyncio.timeout(GUARD_S):
            await engine.aborted.wait()
            await engine.idle.wait()


def messages() -> Any:
    picture = {"type": "image_url", "image_url": {"url": data_url(picture_file())}}
    return [{"role": "user", "content": [{"type": "text", "text": "a cat"}, picture]}]


async def test_chat() -> None:
    engine = FakeEngine()
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=messages(),
            modalities=["image"],  # type: ignore[list-item]
            extra_body={"size": "48x32", "seed": 8},
        )
    content: Any = answer.choices[0].message.content
    assert open_data_url(content[0]["image_url"]["url"]).size == (48, 32)
    assert engine.calls[0].params.seed == 8


async def test_chat_answers_can_be_sent_back() -> None:
    engine = FakeEngine()
    async with openai_client(engine) as client:
        first = await client.chat.completions.create(model=MODEL, messages=messages())
        history: Any = [
            *messages(),
            first.choices[0].message.model_dump(warnings=False),
            {"role": "user", "content": "now at night"},
        ]
        await client.chat.completions.create(model=MODEL, messages=history)
    assert engine.calls[1].prompt == {"prompt": "now at night"}


async def test_chat_stream() -> None:
    async with openai_client(FakeEngine()) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages(), stream=True, n=2
        )
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].index for chunk in chunks] == [0, 1]
    for chunk in chunks:
        content: Any = chunk.choices[0].delta.content
        open_data_url(content[0]["image_url"]["url"])


async def test_models() -> None:
    async with openai_client(FakeEngine()) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_arrive_as_its_own() -> None:
    engine = FakeEngine()
    async with openai_client(engine) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.images.generate(prompt="x", size="9x9x9")
        assert bad.value.param == "size"
        with pytest.raises(openai.NotFoundError):
            await client.images.generate(prompt="x", model="other")
        engine.error = OverloadedError("full", retry_after_s=3)
        with pytest.raises(openai.RateLimitError) as full:
            await client.images.generate(prompt="x")
        assert full.value.response.headers["retry-after"] == "3"
    async with openai_client(engine, key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_file_object_uploads() -> None:
    async with openai_client(FakeEngine()) as client:
        file = io.BytesIO(picture_file())
        file.name = "a.png"
        await client.images.edit(prompt="x", image=file)
