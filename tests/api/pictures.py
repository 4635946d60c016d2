"""Small pictures as files, and back."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image


def picture_file(
    mode: str = "RGB",
    size: tuple[int, int] = (16, 12),
    colour: Any = "red",
    image_format: str = "PNG",
    **options: Any,
) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, image_format, **options)
    return buffer.getvalue()


def data_url(data: bytes, image_format: str = "png") -> str:
    return f"data:image/{image_format};base64,{base64.b64encode(data).decode()}"


def open_base64(text: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)))
    image.load()
    return image


def open_data_url(url: str) -> Image.Image:
    return open_base64(url.partition(",")[2])
