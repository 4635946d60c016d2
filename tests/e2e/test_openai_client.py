"""The `openai` package, unmodified, against the bundled model: requests, pictures and errors."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from tests.api.pictures import data_url, open_base64, open_data_url, picture_file
from tests.e2e.serving import ENDLESS_STEPS, GUARD_S, Server, serving, wait_until

pytestmark = pytest.mark.slow

BUNDLED = "omnistage/tiny-image"
KEY = "sesame"
INFLIGHT = 2
QUICK: dict[str, Any] = {"seed": 3, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--api-key", KEY, "--max-inflight-requests", str(INFLIGHT)]
    with serving(tmp_path_factory.mktemp("openai"), *flags, served=BUNDLED) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def client_of(server: Server, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=GUARD_S)


@pytest.fixture
def name(client: openai.OpenAI) -> str:
    """The served model, as clients find it."""
    (found,) = client.models.list()
    assert client.models.retrieve(found.id).id == found.id
    return found.id


def pictures(answer: Any) -> list[Image.Image]:
    return [open_base64(item.b64_json) for item in answer.data]


def colours(picture: Image.Image) -> int:
    return len(set(picture.convert("RGB").get_flattened_data()))


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_generate(client: openai.OpenAI, name: str, output_format: Any) -> None:
    answer = client.images.generate(
        model=name,
        prompt="a large red circle on yellow",
        n=2,
        size="128x96",  # type: ignore[arg-type]
        output_format=output_format,
        quality="low",
        response_format="b64_json",
        extra_body={"seed": 3, "num_inference_steps": 8},
    )
    first, second = pictures(answer)
    assert (first.size, first.format) == ((128, 96), output_format.upper())
    assert colours(first) > 4, "a plain picture"
    assert first.tobytes() != second.tobytes()
    assert (answer.output_format, answer.size) == (output_format, "128x96")


def test_lossy_formats_show_the_same_picture(client: openai.OpenAI) -> None:
    shown = {}
    for output_format in ("png", "jpeg", "webp"):
        answer = client.images.generate(
            prompt="a red cat",
            size="64x64",  # type: ignore[arg-type]
            output_format=output_format,  # type: ignore[arg-type]
            output_compression=100 if output_format != "png" else None,
            extra_body=QUICK,
        )
        shown[output_format] = pictures(answer)[0].convert("L").resize((4, 4)).tobytes()
    for output_format in ("jpeg", "webp"):
        far = max(abs(a - b) for a, b in zip(shown["png"], shown[output_format], strict=True))
        assert far <= 8, output_format


def test_edit(client: openai.OpenAI, name: str) -> None:
    """The strength of an edit gets through to the model."""
    start = picture_file(size=(64, 64), colour=(250, 10, 10))

    def edited(strength: float) -> Image.Image:
        answer = client.images.edit(
            model=name,
            prompt="a blue cat",
            image=("start.png", start),
            size="64x64",  # type: ignore[arg-type]
            extra_body={"seed": 3, "num_inference_steps": 8, "strength": strength},
        )
        return pictures(answer)[0]

    weak, strong = edited(0.2), edited(1.0)
    assert weak.size == strong.size == (64, 64)
    assert weak.tobytes() != strong.tobytes()


def test_edit_with_a_mask(client: openai.OpenAI, name: str) -> None:
    """What is repainted depends on the mask alone: all else is equal."""

    def edited(*transparent: int) -> bytes:
        mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
        mask.paste((0, 0, 0, 0), transparent)
        file = io.BytesIO()
        mask.save(file, "PNG")
        answer = client.images.edit(
            model=name,
            prompt="a blue cat",
            image=("start.png", picture_file(size=(64, 64))),
            mask=("mask.png", file.getvalue()),
            size="64x64",  # type: ignore[arg-type]
            extra_body={"seed": 3, "num_inference_steps": 4, "strength": 1.0},
        )
        (picture,) = pictures(answer)
        assert picture.size == (64, 64)
        return picture.tobytes()

    left, right = edited(0, 0, 32, 64), edited(32, 0, 64, 64)
    assert left == edited(0, 0, 32, 64)
    assert left != right


def messages() -> Any:
    return [{"role": "user", "content": "a red cat"}]


def test_chat(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=name,
        messages=messages(),
        modalities=["image"],  # type: ignore[list-item]
        extra_body={"size": "64x48", **QUICK},
    )
    content: Any = answer.choices[0].message.content
    assert open_data_url(content[0]["image_url"]["url"]).size == (64, 48)
    assert answer.choices[0].finish_reason == "stop"


def test_chat_that_starts_from_a_picture(client: openai.OpenAI, name: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(picture_file(size=(64, 64)))}}
    content = [{"type": "text", "text": "a blue cat"}, picture]
    answer = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": content}],  # type: ignore[misc,list-item]
        extra_body={"size": "64x64", **QUICK},
    )
    made: Any = answer.choices[0].message.content
    assert open_data_url(made[0]["image_url"]["url"]).size == (64, 64)


def test_chat_stream_is_the_same_picture(client: openai.OpenAI, name: str) -> None:
    asked: dict[str, Any] = {
        "model": name,
        "messages": messages(),
        "extra_body": {"size": "64x48", **QUICK},
    }
    whole: Any = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.content or []]
    urls = [part["image_url"]["url"] for part in parts]
    assert urls == [whole[0]["image_url"]["url"]]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_what_is_wrong_arrives_as_the_errors_of_the_package(
    client: openai.OpenAI, server: Server
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.images.generate(prompt="a cat", size="9x9x9")  # type: ignore[call-overload]
    assert bad.value.param == "size"
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="a cat", model="no-such-model")
    with client_of(server, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


async def test_an_overload_is_refused_at_once_and_passes(server: Server) -> None:
    """One more than the server takes gets 429 with a hint; when the others hang up, it works."""
    endless = {"seed": 1, "num_inference_steps": ENDLESS_STEPS}
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=GUARD_S
    ) as client:
        size: Any = "64x64"
        running = [
            asyncio.create_task(
                client.images.generate(prompt="a cat", size=size, extra_body=endless)
            )
            for _ in range(INFLIGHT)
        ]
        await asyncio.to_thread(
            wait_until, lambda: server.replica()["requests"] == INFLIGHT, "the server to be full"
        )
        with pytest.raises(openai.RateLimitError) as full:
            await client.images.generate(prompt="a cat", size=size, extra_body=QUICK)
        assert int(full.value.response.headers["retry-after"]) >= 1
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(
            wait_until, lambda: server.replica()["requests"] == 0, "the server to be empty"
        )
        answer = await client.images.generate(prompt="a cat", size=size, extra_body=QUICK)
    assert len(pictures(answer)) == 1


def test_the_served_name_is_the_models(name: str) -> None:
    assert name == BUNDLED
