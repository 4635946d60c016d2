"""Picture inputs: taken by the pipeline itself or by its sibling over the same weights."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from omnistage.contracts.errors import InvalidRequestError
from omnistage.diffusion.signature import signature_of
from tests.checkpoints import FAMILIES, checkpoint
from tests.checkpoints.family import gradient_image
from tests.diffusion.driver import Driver, diffusion_request
from tests.diffusion.reference import reference_images, request_of, same_bits

SEED = 7
PICTURE = gradient_image(48, 32)

IMG2IMG = {
    "qwen_image": "QwenImageImg2ImgPipeline",
    "flux": "FluxImg2ImgPipeline",
    "sd3": "StableDiffusion3Img2ImgPipeline",
    "sd15": "StableDiffusionImg2ImgPipeline",
    "sdxl": "StableDiffusionXLImg2ImgPipeline",
    "z_image": "ZImageImg2ImgPipeline",
    "kandinsky3": "Kandinsky3Img2ImgPipeline",
    "chroma": "ChromaImg2ImgPipeline",
}
INPAINT = {
    "qwen_image": "QwenImageInpaintPipeline",
    "flux": "FluxInpaintPipeline",
    "sdxl": "StableDiffusionXLInpaintPipeline",
    "sd15": "StableDiffusionInpaintPipeline",
}


def sibling(pipeline, class_name):
    import diffusers

    made = getattr(diffusers, class_name)(**pipeline.components)
    made.set_progress_bar_config(disable=True)
    return made


def picture_call(name, pipeline, **changes):
    """The family's call without a size where the sibling takes it from the picture."""
    signature = signature_of(type(pipeline))
    call = {**FAMILIES[name].call, "image": PICTURE, "strength": 0.5, **changes}
    return {key: value for key, value in call.items() if key in signature}


@pytest.mark.parametrize("name", IMG2IMG)
def test_image_to_image_equals_the_sibling_of_diffusers(name, driver, reference):
    pipeline = sibling(reference(name), IMG2IMG[name])
    call = picture_call(name, pipeline)
    theirs = reference_images(pipeline, call, SEED, "np")
    assert theirs.std() >= 0.05
    ours = driver(name).run(request_of(call, SEED, "np")).tensors["images"]
    assert same_bits(ours, theirs)
    other = picture_call(name, pipeline, image=PICTURE.transpose(Image.Transpose.ROTATE_180))
    assert not same_bits(driver(name).run(request_of(other, SEED, "np")).tensors["images"], theirs)


@pytest.mark.parametrize("name", INPAINT)
def test_inpainting_equals_the_sibling_of_diffusers(name, driver, reference):
    pipeline = sibling(reference(name), INPAINT[name])
    mask = np.zeros((32, 48), np.uint8)
    mask[8:24, 8:40] = 255
    call = picture_call(name, pipeline, height=32, width=48)
    theirs = reference_images(pipeline, {**call, "mask_image": Image.fromarray(mask)}, SEED, "np")
    request = request_of(call, SEED, "np")
    request.data.tensors["mask_0"] = mask
    assert same_bits(driver(name).run(request).tensors["images"], theirs)


@pytest.mark.invariant("DIFF-MODEL-INV-010")
def test_a_sibling_shares_every_component_and_is_made_once(driver):
    ours = driver("flux")
    call = picture_call("flux", ours.executor._variants._sibling("Img2Img"))
    ours.run(request_of(call, SEED, None))
    made = ours.executor._variants._sibling("Img2Img")
    assert made is ours.executor._variants._sibling("Img2Img")
    for part, module in ours.pipeline.components.items():
        if part in made.components:
            assert made.components[part] is module
    assert {p.dtype for p in made.transformer.parameters()} == {
        p.dtype for p in ours.pipeline.transformer.parameters()
    }


def test_a_family_without_a_sibling_refuses_pictures(driver):
    request = diffusion_request(images=(np.asarray(PICTURE),), seed=SEED)
    with pytest.raises(InvalidRequestError, match="does not take images"):
        driver("lumina2").run(request)


def test_too_many_pictures_are_refused(driver):
    request = diffusion_request(images=(np.asarray(PICTURE),) * 2, seed=SEED)
    with pytest.raises(InvalidRequestError, match=r"at most 1 image\(s\), got 2"):
        driver("flux_kontext").run(request)


def test_a_mask_without_a_picture_is_refused(driver):
    request = diffusion_request(masks=(np.zeros((32, 48), np.uint8),), seed=SEED)
    with pytest.raises(InvalidRequestError, match="exactly one image"):
        driver("sd15").run(request)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_grey_and_transparent_pictures_are_taken_as_rgb(channels, driver):
    grey = np.asarray(PICTURE.convert("L"))
    picture = np.stack([grey] * channels, axis=2)
    if channels == 4:
        picture[:, :, 3] = 255
    size = {"num_inference_steps": 2, "seed": SEED}
    ours = driver("sd15").run(diffusion_request(images=(picture,), **size))
    rgb = np.stack([grey] * 3, axis=2)
    expected = driver("sd15").run(diffusion_request(images=(rgb,), **size))
    assert same_bits(ours.tensors["images"], expected.tensors["images"])


def test_a_picture_of_the_wrong_kind_is_refused(driver):
    request = diffusion_request(images=(np.zeros((32, 48, 3), np.float32),), seed=SEED)
    with pytest.raises(InvalidRequestError, match=r"uint8 of shape \(height, width, 1, 3 or 4\)"):
        driver("sd15").run(request)


def test_an_editor_without_a_picture_is_refused():
    editor = Driver(checkpoint("qwen_image_edit"), options={"image_input": "required"})
    with pytest.raises(InvalidRequestError, match="needs an image"):
        editor.run(diffusion_request(seed=SEED))
