from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from omnistage.api import image_stream
from omnistage.api.routes import chat, images
from omnistage.api.settings import ApiSettings
from omnistage.contracts.modalities import Modality
from tests.api.conftest import open_client
from tests.api.fake_engine import DEFAULT_SIDE, MODEL, FakeEngine
from tests.api.pictures import open_base64, open_data_url, picture_file

GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"


async def fails(client: httpx.AsyncClient, body: object, status: int = 400) -> dict[str, object]:
    response = await client.post(GENERATIONS, json=body)
    assert response.status_code == status, response.text
    error: dict[str, object] = response.json()["error"]
    return error


@pytest.mark.invariant("ENTRY-INV-100")
async def test_every_field_reaches_the_engine_typed(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {
        "prompt": "a cat",
        "model": MODEL,
        "n": 2,
        "size": "64x48",
        "negative_prompt": "a dog",
        "num_inference_steps": 7,
        "guidance_scale": 3,
        "true_cfg_scale": 4.5,
        "strength": 0.5,
        "seed": 11,
        "quality": "high",
        "user": "somebody",
        "background": "opaque",
        "stream": False,
    }
    response = await client.post(GENERATIONS, json=body)
    assert response.status_code == 200, response.text
    (call,) = engine.calls
    assert call.prompt == {"prompt": "a cat", "negative_prompt": "a dog"}
    assert (call.params.width, call.params.height) == (64, 48)
    assert call.params.num_outputs_per_prompt == 2
    assert call.params.num_inference_steps == 7
    assert (call.params.guidance_scale, call.params.true_cfg_scale) == (3, 4.5)
    assert (call.params.strength, call.params.seed, call.params.quality) == (0.5, 11, "high")
    assert call.output_modalities == [Modality.IMAGE]


async def test_the_answer_holds_n_pictures_their_size_and_the_seed(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"prompt": "a cat", "n": 3, "size": "40x24", "seed": 5}
    answer = (await client.post(GENERATIONS, json=body)).json()
    pictures = [open_base64(item["b64_json"]) for item in answer["data"]]
    assert [picture.size for picture in pictures] == [(40, 24)] * 3
    assert len({picture.getpixel((0, 0)) for picture in pictures}) == 3
    assert (answer["size"], answer["output_format"], answer["seed"]) == ("40x24", "png", 5)
    assert engine.metrics.images == 3


async def test_a_seed_is_chosen_and_named_when_none_is_given(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    seeds = [(await client.post(GENERATIONS, json={"prompt": "x"})).json()["seed"] for _ in "12"]
    assert seeds == [call.params.seed for call in engine.calls]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("size", ["auto", None])
async def test_size_auto_leaves_the_size_to_the_model(
    client: httpx.AsyncClient, engine: FakeEngine, size: str | None
) -> None:
    answer = (await client.post(GENERATIONS, json={"prompt": "x", "size": size})).json()
    assert (engine.calls[0].params.width, engine.calls[0].params.height) == (None, None)
    assert answer["size"] == f"{DEFAULT_SIDE}x{DEFAULT_SIDE}"


@pytest.mark.parametrize(("name", "pillow"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
async def test_output_formats(client: httpx.AsyncClient, name: str, pillow: str) -> None:
    body = {"prompt": "x", "output_format": name}
    answer = (await client.post(GENERATIONS, json=body)).json()
    assert open_base64(answer["data"][0]["b64_json"]).format == pillow
    assert answer["output_format"] == name


async def test_a_url_is_a_data_url(client: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "response_format": "url", "output_format": "webp"}
    (item,) = (await client.post(GENERATIONS, json=body)).json()["data"]
    assert set(item) == {"url"}
    assert item["url"].startswith("data:image/webp;base64,")
    assert open_data_url(item["url"]).format == "WEBP"


@pytest.mark.invariant("ENTRY-INV-100")
@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"promt": "x"}, "promt", "did you mean 'prompt'?"),
        ({"guidance": 1}, "guidance", "did you mean 'guidance_scale'?"),
        ({"steps": 1}, "steps", "did you mean 'num_inference_steps'?"),
        ({"style": "vivid"}, "style", "allowed: background"),
        ({"zzzzzz": 1}, "zzzzzz", "allowed: background"),
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "a\x00b"}, "prompt", "NUL"),
        ({"n": True}, "n", "True"),
        ({"n": "2"}, "n", "integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"seed": 2**63}, "seed", "less than or equal"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"size": "64"}, "size", "write WIDTHxHEIGHT"),
        ({"size": "0x64"}, "size", "write WIDTHxHEIGHT"),
        ({"size": "６４x６４"}, "size", "write WIDTHxHEIGHT"),
        ({"strength": 1.5}, "strength", "less than or equal to 1"),
        ({"output_format": "gif"}, "output_format", "'png', 'jpeg' or 'webp'"),
        ({"background": "transparent"}, "background", "not offered"),
        ({"output_compression": 50}, "output_compression", "jpeg"),
    ],
)
async def test_a_wrong_field_is_named_with_what_is_allowed(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    change: dict[str, object],
    param: str,
    words: str,
) -> None:
    error = await fails(client, {"prompt": "x", **change})
    assert error["param"] == param
    assert words in str(error["message"])
    assert engine.calls == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "x", "guidance_scale": NaN}',
        b'{"prompt": "x", "guidance_scale": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"prompt": "x"} trailing',
        b"[]",
        b"null",
    ],
)
async def test_what_is_no_clean_json_is_a_bad_request(
    client: httpx.AsyncClient, body: bytes
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post(GENERATIONS, content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_of_another_type_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post(GENERATIONS, content=b'{"prompt": "x"}')
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "content-type"


async def test_a_large_body_is_validated_off_the_loop_with_the_same_result() -> None:
    engine = FakeEngine()
    async with open_client(engine, ApiSettings(max_prompt_chars=10**6)) as client:
        good = await client.post(GENERATIONS, json={"prompt": "x" * 400_000})
        bad = await client.post(GENERATIONS, json={"prompt": "x" * 400_000, "n": "2"})
    assert (good.status_code, bad.status_code) == (200, 400)
    assert bad.json()["error"]["param"] == "n"


@pytest.mark.invariant("ENTRY-INV-103")
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 3}, "n"),
        ({"num_inference_steps": 11}, "num_inference_steps"),
        ({"size": "65x64"}, "size"),
        ({"prompt": "y" * 9}, "prompt"),
        ({"negative_prompt": "y" * 9}, "negative_prompt"),
    ],
)
async def test_each_limit_has_its_own_error_before_the_engine_is_asked(
    change: dict[str, object], param: str
) -> None:
    engine = FakeEngine()
    settings = ApiSettings(max_n=2, max_steps=10, max_pixels=64 * 64, max_prompt_chars=8)
    at_the_limit = {
        "prompt": "y" * 8,
        "negative_prompt": "y" * 8,
        "n": 2,
        "num_inference_steps": 10,
        "size": "64x64",
    }
    async with open_client(engine, settings) as client:
        assert (await client.post(GENERATIONS, json=at_the_limit)).status_code == 200
        error = await fails(client, {**at_the_limit, **change})
    assert error["param"] == param
    assert "limit" in str(error["message"])
    assert len(engine.calls) == 1


async def test_another_model_is_not_found(client: httpx.AsyncClient) -> None:
    error = await fails(client, {"prompt": "x", "model": "other"}, status=404)
    assert error["param"] == "model"
    assert MODEL in str(error["message"])


async def test_a_model_that_makes_no_images_says_so() -> None:
    async with open_client(FakeEngine(modality=Modality.AUDIO)) as client:
        error = await fails(client, {"prompt": "x"})
    assert "audio" in str(error["message"])


async def test_an_edit_hands_pictures_and_mask_to_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    mask = picture_file("RGBA", colour=(0, 0, 0, 0))
    response = await client.post(
        EDITS,
        data={"prompt": "x", "n": "2", "guidance_scale": "2.5", "seed": "3", "size": "24x16"},
        files=[
            ("image[]", ("a.png", picture_file(colour="red"))),
            ("image[]", ("b.jpg", picture_file(size=(8, 8), image_format="JPEG"))),
            ("mask", ("m.png", mask)),
        ],
    )
    assert response.status_code == 200, response.text
    assert len(response.json()["data"]) == 2
    (call,) = engine.calls
    inputs = call.prompt["multi_modal_data"]
    assert [picture.size for picture in inputs["image"]] == [(16, 12), (8, 8)]
    assert inputs["mask"].getextrema() == (255, 255)
    assert (call.params.guidance_scale, call.params.seed, call.params.width) == (2.5, 3, 24)


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"prompt": "x"}, [("mask", picture_file())], "image"),
        ({}, [("image", picture_file())], "prompt"),
        ({"prompt": "x", "n": "two"}, [("image", picture_file())], "n"),
        ({"prompt": "x", "guidance_scale": "nan"}, [("image", picture_file())], "guidance_scale"),
        ({"prompt": "x", "sead": "1"}, [("image", picture_file())], "sead"),
        ({"prompt": ["x", "y"]}, [("image", picture_file())], "prompt"),
        ({"prompt": "x"}, [("image", b"no picture")], "image"),
        ({"prompt": "x"}, [("image", picture_file()[:-30])], "image"),
        ({}, [("image", picture_file()), ("prompt", b"x")], "prompt"),
        (
            {"prompt": "x"},
            [("image", picture_file()), ("mask", picture_file(size=(3, 3)))],
            "mask",
        ),
        (
            {"prompt": "x"},
            [("image", picture_file()), *[("mask", picture_file())] * 2],
            "mask",
        ),
        ({"prompt": "x", "image": "text"}, [("image", picture_file())], "image"),
    ],
)
async def test_a_wrong_form_names_the_field(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    data: dict[str, object],
    files: list[tuple[str, bytes]],
    param: str,
) -> None:
    uploads = [(name, (f"{name}.png", content)) for name, content in files]
    response = await client.post(EDITS, data=data, files=uploads)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert engine.calls == []


@pytest.mark.invariant("ENTRY-INV-103")
async def test_limits_of_uploaded_pictures() -> None:
    engine = FakeEngine()
    settings = ApiSettings(
        max_input_images=2, max_input_pixels=400, max_total_input_pixels=500, max_media_bytes=4000
    )
    small, half = picture_file(size=(10, 10)), picture_file(size=(20, 15))
    cases = {
        "count": ([small] * 3, 400),
        "far over the count": ([small] * 9, 400),
        "pixels": ([picture_file(size=(21, 20))], 400),
        "pixels together": ([half, half], 400),
        "bytes": ([small + b"\0" * 4000], 413),
    }
    async with open_client(engine, settings) as client:
        for name, (pictures, status) in cases.items():
            files = [("image[]", ("a.png", picture)) for picture in pictures]
            response = await client.post(EDITS, data={"prompt": "x"}, files=files)
            assert response.status_code == status, (name, response.text)
        assert engine.calls == []
        files = [("image[]", ("a.png", picture)) for picture in (half, small)]
        assert (await client.post(EDITS, data={"prompt": "x"}, files=files)).status_code == 200


@pytest.mark.invariant("ENTRY-INV-201")
async def test_pictures_are_encoded_in_worker_threads(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = images.encode_image

    def recording(*arguments: Any, **options: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return encode(*arguments, **options)

    monkeypatch.setattr(images, "encode_image", recording)
    monkeypatch.setattr(chat, "encode_image", recording)
    monkeypatch.setattr(image_stream, "encode_image", recording)
    await client.post(GENERATIONS, json={"prompt": "x"})
    await client.post(GENERATIONS, json={"prompt": "x", "stream": True, "partial_images": 2})
    messages = [{"role": "user", "content": "x"}]
    for stream in (False, True):
        body = {"messages": messages, "stream": stream}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert len(threads) == 6
    assert all(name.startswith("omnistage-media") for name in threads)
