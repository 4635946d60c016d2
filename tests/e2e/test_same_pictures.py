"""One seed, one picture, bit for bit: over HTTP, from Python, from the command, from diffusers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnistage import Omni, OmniDiffusionSamplingParams
from omnistage.cli.http_client import open_picture, read_pictures
from tests.api.pictures import picture_file
from tests.cli.running import run
from tests.diffusion.reference import reference_pipeline
from tests.e2e.serving import Server, model, post

pytestmark = pytest.mark.slow

PROMPT = "a red cat on a blue mat"
NEGATIVE_PROMPT = "blurry"
SEED = 1234
KNOBS: dict[str, Any] = {"num_inference_steps": 3, "true_cfg_scale": 3.5}
WIDTH, HEIGHT = 64, 48


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return reference_pipeline(Path(model()))


def generator() -> Any:
    import torch

    return torch.Generator("cpu").manual_seed(SEED)


@pytest.fixture(scope="module")
def expected(pipeline: Any) -> list[Image.Image]:
    """Two pictures of bare diffusers."""
    images: list[Image.Image] = pipeline(
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        width=WIDTH,
        height=HEIGHT,
        num_images_per_prompt=2,
        generator=generator(),
        **KNOBS,
    ).images
    assert np.asarray(images[0]).std() > 10, "a plain picture would prove nothing"
    assert images[0].tobytes() != images[1].tobytes()
    return images


def assert_same(found: list[Image.Image], expected: list[Image.Image]) -> None:
    assert [picture.size for picture in found] == [picture.size for picture in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.convert("RGB").tobytes() == theirs.tobytes()


def test_over_http(server: Server, expected: list[Image.Image]) -> None:
    answer = post(
        server,
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        n=2,
        size=f"{WIDTH}x{HEIGHT}",
        seed=SEED,
        **KNOBS,
    )
    assert_same([open_picture(data) for data in read_pictures(answer)], expected)
    assert answer.json()["seed"] == SEED


def test_another_seed_is_another_picture(server: Server, expected: list[Image.Image]) -> None:
    size = f"{WIDTH}x{HEIGHT}"
    answer = post(server, prompt=PROMPT, size=size, seed=SEED + 1, **KNOBS)
    (data,) = read_pictures(answer)
    assert open_picture(data).tobytes() != expected[0].tobytes()


@pytest.mark.parametrize("process", ["inline", "separate"])
def test_from_python(process: str, expected: list[Image.Image]) -> None:
    params = OmniDiffusionSamplingParams(
        width=WIDTH, height=HEIGHT, seed=SEED, num_outputs_per_prompt=2, **KNOBS
    )
    prompt: Any = {"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT}
    with Omni(model(), device="cpu", process=process, log_level="error") as omni:
        (output,) = omni.generate(prompt, params, use_tqdm=False)
    assert output.error is None
    assert_same(output.images, expected)


def test_from_the_command(tmp_path: Path, expected: list[Image.Image]) -> None:
    target = tmp_path / "cat.png"
    words = ["generate", model(), "--prompt", PROMPT, "--negative-prompt", NEGATIVE_PROMPT]
    words += ["--size", f"{WIDTH}x{HEIGHT}", "--seed", str(SEED), "--n", "2", "--device", "cpu"]
    words += ["--steps", str(KNOBS["num_inference_steps"]), "--output", str(target)]
    ended = run([*words, "--true-cfg-scale", str(KNOBS["true_cfg_scale"]), "--no-progress"])
    assert ended.code == 0, ended.err
    assert ended.left_behind == ()
    written = [Image.open(path) for path in ended.out.split()]
    assert_same(written, expected)


def test_an_edit_with_a_mask_over_http(server: Server, pipeline: Any) -> None:
    from diffusers import QwenImageInpaintPipeline

    start = picture_file(size=(WIDTH, HEIGHT), colour=(250, 120, 10))
    mask = Image.new("L", (WIDTH, HEIGHT), 0)
    mask.paste(255, (WIDTH // 2, 0, WIDTH, HEIGHT))
    mask_file = io.BytesIO()
    mask.save(mask_file, "PNG")
    theirs = QwenImageInpaintPipeline.from_pipe(pipeline)
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        image=Image.open(io.BytesIO(start)),
        mask_image=mask,
        width=WIDTH,
        height=HEIGHT,
        strength=0.8,
        generator=generator(),
        **KNOBS,
    ).images
    fields = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE_PROMPT,
        "size": f"{WIDTH}x{HEIGHT}",
        "strength": "0.8",
        "seed": str(SEED),
        **{name: json.dumps(value) for name, value in KNOBS.items()},
    }
    files = {"image": ("start.png", start), "mask": ("mask.png", mask_file.getvalue())}
    with server.client() as client:
        answer = client.post("/v1/images/edits", data=fields, files=files)
    assert_same([open_picture(data) for data in read_pictures(answer)], expected)
