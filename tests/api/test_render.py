from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from omnistage.api.render import encode_image, to_data_url


def decoded(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "LA", "CMYK"])
@pytest.mark.parametrize("image_format", ["png", "jpeg", "webp"])
def test_every_mode_becomes_every_format(mode: str, image_format: Any) -> None:
    image = decoded(encode_image(Image.new(mode, (9, 5)), image_format))
    assert (image.format, image.size) == (image_format.upper(), (9, 5))


def test_png_is_exact() -> None:
    image = Image.effect_noise((33, 17), 80).convert("RGB")
    assert decoded(encode_image(image, "png")).tobytes() == image.tobytes()


def test_transparency_becomes_white_in_jpeg_only() -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    red, green, blue = decoded(encode_image(image, "jpeg")).getpixel((4, 4))
    assert min(red, green, blue) > 250
    assert decoded(encode_image(image, "png")).getpixel((4, 4)) == (255, 0, 0, 0)


@pytest.mark.parametrize("image_format", ["jpeg", "webp"])
def test_compression_is_the_quality(image_format: Any) -> None:
    image = Image.effect_noise((64, 64), 80).convert("RGB")
    low, high = (len(encode_image(image, image_format, compression=q)) for q in (0, 100))
    assert low < high


def test_data_urls_name_the_format() -> None:
    assert to_data_url(b"abc", "jpeg") == "data:image/jpeg;base64,YWJj"
