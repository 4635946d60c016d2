"""Pictures whose latents join the sequence of the result's: their sizes and pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

MEGAPIXEL = 1024 * 1024
_MULTIPLE = 32

Size = tuple[int, int]


def size_of_area(picture: Image, area: int) -> Size:
    """(height, width) in pixels of about `area` and in the picture's proportions, as multiples of
    32 (diffusers' `calculate_dimensions` of its editing pipelines)."""
    ratio = picture.width / picture.height
    width = math.sqrt(area * ratio)
    height = width / ratio
    return round(height / _MULTIPLE) * _MULTIPLE, round(width / _MULTIPLE) * _MULTIPLE


def pixels_of(pipeline: Any, pictures: Sequence[Image], sizes: Sequence[Size]) -> Any:
    """What an editing pipeline's `prepare_latents` takes: float32 (1, 3, 1, height, width) in
    [-1, 1], a list of them for several pictures."""
    preprocess = pipeline.image_processor.preprocess
    pairs = zip(pictures, sizes, strict=True)
    pixels = [preprocess(picture, *size).unsqueeze(2) for picture, size in pairs]
    return pixels if len(pixels) > 1 else pixels[0]
