"""The shipped checkpoint keeps its promises, through nothing but diffusers.

How often a picture shows what its prompt asks for is measured on attribute combinations that
training never saw, by a checker that looks at pixels only.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImageImg2ImgPipeline, QwenImagePipeline
from PIL import Image
from training.tiny_image.checker import judge, read_picture
from training.tiny_image.evaluate import accuracies, draw, held_out_requests, judge_all
from training.tiny_image.render import render_scene
from training.tiny_image.scenes import Scene, Thing, random_scene

MAX_CHECKPOINT_BYTES = 12_000_000
ONE_THING_PROMPTS = 100
TWO_THINGS_PROMPTS = 60
CLASSES = {
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "text_encoder": "Qwen2_5_VLForConditionalGeneration",
    "tokenizer": "Qwen2Tokenizer",
    "transformer": "QwenImageTransformer2DModel",
    "vae": "AutoencoderKLQwenImage",
}


def test_size(checkpoint: Path) -> None:
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_CHECKPOINT_BYTES


def test_layout(pipeline: QwenImagePipeline) -> None:
    assert {name: type(part).__name__ for name, part in pipeline.components.items()} == CLASSES
    assert isinstance(pipeline, QwenImagePipeline)


def test_the_pipeline_drops_the_template_and_no_word_of_the_prompt(
    pipeline: QwenImagePipeline,
) -> None:
    prefix, suffix = pipeline.prompt_template_encode.split("{}")
    tokenizer = pipeline.tokenizer
    assert len(tokenizer(prefix).input_ids) == pipeline.prompt_template_encode_start_idx
    for prompt in ("a red circle", "RED CIRCLE", "", "日本 qzx"):
        embeddings, _ = pipeline.encode_prompt(prompt)
        assert embeddings.shape[1] == len(tokenizer(prompt + suffix).input_ids)


@pytest.fixture(scope="module")
def shares(pipeline: QwenImagePipeline) -> dict[int, dict[str, float]]:
    """Accuracies by attribute, for held-out prompts of one and of two things."""
    measured = {}
    for things, count in ((1, ONE_THING_PROMPTS), (2, TWO_THINGS_PROMPTS)):
        requests = held_out_requests(count, things)
        pictures = draw(pipeline, [request.prompt for request in requests])
        measured[things] = accuracies(judge_all(requests, pictures))
    return measured


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_held_out_prompts_ask_for_is_where_they_ask_for_it(
    shares: dict[int, dict[str, float]],
) -> None:
    for attribute in ("count", "position", "background"):
        assert shares[1][attribute] >= 0.95
        assert shares[2][attribute] >= 0.90
    assert shares[1]["colour"] >= 0.95
    assert shares[1]["shape"] >= 0.72
    assert shares[2]["exact"] >= 0.58


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xfail(strict=True, reason="a blurry decoder: training/tiny_image/README.md")
def test_held_out_prompts_are_followed_in_every_attribute(
    shares: dict[int, dict[str, float]],
) -> None:
    assert shares[1]["colour"] >= 0.95
    assert shares[1]["shape"] >= 0.95
    assert shares[2]["exact"] >= 0.85


def test_the_same_seed_draws_the_same_picture(pipeline: QwenImagePipeline) -> None:
    first, second = (draw(pipeline, ["a green heart on black"], steps=2)[0] for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize(("width", "height"), [(64, 64), (96, 160), (256, 256)])
def test_other_sizes_work(pipeline: QwenImagePipeline, width: int, height: int) -> None:
    image = pipeline("a blue ring", width=width, height=height, num_inference_steps=2).images[0]
    assert image.size == (width, height)


def test_the_autoencoder_keeps_pictures(pipeline: QwenImagePipeline) -> None:
    rng = random.Random(0)
    pictures = torch.stack([render_scene(random_scene(rng), rng) for _ in range(12)])
    images = pictures.permute(0, 3, 1, 2)[:, :, None].float() / 127.5 - 1
    with torch.no_grad():
        decoded = pipeline.vae.decode(pipeline.vae.encode(images).latent_dist.mode()).sample
    psnr_db = 10 * torch.log10(4 / (decoded - images).square().mean())
    assert psnr_db >= 31


def test_image_to_image_follows_the_prompt(pipeline: QwenImagePipeline) -> None:
    start = Scene((Thing("red", "circle", "large", "center"),), "white")
    image_to_image = QwenImageImg2ImgPipeline(**pipeline.components)
    image_to_image.set_progress_bar_config(disable=True)
    image = image_to_image(
        "a large blue circle",
        image=Image.fromarray(render_scene(start, random.Random(0)).numpy()),
        strength=0.9,
        num_inference_steps=10,
        width=128,
        height=128,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    asked = Scene((Thing("blue", "circle", "large", "center"),), "white")
    assert judge(asked, read_picture(np.asarray(image))).exact
