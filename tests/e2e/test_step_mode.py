"""A server in step mode: previews as events, requests side by side, cancelled between steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.api.pictures import open_base64, picture_file
from tests.e2e.serving import ENDLESS_STEPS, GUARD_S, Server, body, post, serving, wait_until

pytestmark = pytest.mark.slow

BUNDLED = "omnistage/tiny-image"
ROUNDING = 1
"""Of a pixel's 255 steps: a batch may round the last bit of a float the other way."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--diffusion-streaming-output", "--max-num-seqs", "4"]
    with serving(tmp_path_factory.mktemp("steps"), *flags, served=BUNDLED) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    address = f"{server.url}/v1"
    with openai.OpenAI(base_url=address, api_key="-", max_retries=0, timeout=GUARD_S) as one:
        yield one


def far(a: Image.Image, b: Image.Image) -> float:
    difference = np.asarray(a.convert("RGB"), np.int16) - np.asarray(b.convert("RGB"), np.int16)
    return float(np.abs(difference).mean())


def farthest(a: Image.Image, b: Image.Image) -> int:
    difference = np.asarray(a.convert("RGB"), np.int16) - np.asarray(b.convert("RGB"), np.int16)
    return int(np.abs(difference).max())


def test_previews_come_nearer_to_the_picture(client: openai.OpenAI) -> None:
    events = list(
        client.images.generate(
            prompt="a large red circle on yellow",
            size="128x128",  # type: ignore[arg-type]
            stream=True,
            partial_images=3,
            extra_body={"seed": 5, "num_inference_steps": 8},
        )
    )
    *partial, completed = events
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 3
    assert [event.partial_image_index for event in partial] == [0, 1, 2]
    assert completed.type == "image_generation.completed"
    final = open_base64(completed.b64_json)
    distances = [far(open_base64(event.b64_json), final) for event in partial]
    assert final.size == (128, 128)
    assert distances[0] > distances[2] > 0, distances


def test_without_previews_there_is_the_picture_alone(client: openai.OpenAI) -> None:
    (completed,) = client.images.generate(
        prompt="a blue square",
        size="64x64",  # type: ignore[arg-type]
        stream=True,
        extra_body={"seed": 5, "num_inference_steps": 3},
    )
    assert completed.type == "image_generation.completed"


def test_a_picture_does_not_depend_on_who_is_beside(server: Server) -> None:
    wanted: list[dict[str, Any]] = [
        {"prompt": "a red circle", "seed": 1, "num_inference_steps": 6},
        {"prompt": "a small blue square left and a star", "seed": 2, "num_inference_steps": 9},
        {"prompt": "a star", "seed": 3, "num_inference_steps": 4, "size": "64x96"},
        {"prompt": "a red circle", "seed": 4, "num_inference_steps": 7, "n": 2},
        {"prompt": "a triangle", "seed": 5, "num_inference_steps": 5, "true_cfg_scale": 1.0},
    ]
    alone = [shown(server, one) for one in wanted]
    with ThreadPoolExecutor(len(wanted)) as pool:
        together = list(pool.map(lambda one: shown(server, one), wanted))
    for before, after in zip(alone, together, strict=True):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert farthest(one, other) <= ROUNDING
    assert farthest(alone[0][0], alone[3][0]) > 50, "the seed tells"


def shown(server: Server, fields: dict[str, Any]) -> list[Image.Image]:
    answer = post(server, **fields)
    assert answer.status_code == 200, answer.text
    return [open_base64(item["b64_json"]) for item in answer.json()["data"]]


def test_a_caller_who_leaves_frees_the_place_between_steps(server: Server) -> None:
    with server.client() as client:
        request = body(num_inference_steps=ENDLESS_STEPS, stream=True)
        with client.stream("POST", "/v1/images/generations", json=request) as answer:
            assert answer.status_code == 200
            wait_until(lambda: server.replica()["requests"] == 1, "the request runs")
            assert post(server).status_code == 200, "others are served beside it"
    wait_until(lambda: server.replica()["requests"] == 0, "nothing runs any more")
    assert post(server).status_code == 200


def test_pictures_to_change_are_refused_with_the_way_out(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"takes no pictures.*--step-execution"):
        client.images.edit(
            prompt="a blue cat",
            image=("start.png", picture_file(size=(64, 64))),
            size="64x64",  # type: ignore[arg-type]
            extra_body={"num_inference_steps": 2},
        )
