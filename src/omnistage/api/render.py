"""Pictures to bytes. Runs in a worker thread."""

from __future__ import annotations

import base64
import io
from typing import Literal

from PIL import Image

ImageFormat = Literal["png", "jpeg", "webp"]

_DEFAULT_QUALITY = {"jpeg": 95, "webp": 90}


def encode_image(
    image: Image.Image, image_format: ImageFormat, *, compression: int | None = None
) -> bytes:
    """A file of that format. `compression` is the quality from 0 to 100 of jpeg and webp."""
    if image_format == "jpeg":
        image = _without_alpha(image)
    elif image.mode not in ("RGB", "RGBA", "L"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    options: dict[str, int] = {}
    if image_format in _DEFAULT_QUALITY:
        options["quality"] = _DEFAULT_QUALITY[image_format] if compression is None else compression
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def _without_alpha(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(ground, layered).convert("RGB")


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def to_data_url(data: bytes, image_format: ImageFormat) -> str:
    return f"data:image/{image_format};base64,{to_base64(data)}"
