"""Pictures from clients: where they may come from and what is made of their bytes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from omnistage.api.media_bytes import FileSource
from omnistage.api.settings import ApiSettings
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InvalidRequestError, OmniError, PayloadTooLargeError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

ReadBytes = Callable[[], Awaitable[bytes]]


def decode_picture(data: bytes, *, max_pixels: int) -> Image.Image:
    """The first frame as an RGB or RGBA picture, turned upright as its EXIF data says.

    The size is checked in the header, before any pixel is decoded. Raises `InvalidRequestError`.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_pixels(image.size, max_pixels)
            image.load()
            return _plain_colours(ImageOps.exif_transpose(image))
    except (OmniError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise InvalidRequestError(
            f"the data is no picture of a known format; allowed: {', '.join(FORMATS)}"
        ) from error
    except Exception as error:  # Pillow's decoders raise nearly every kind on broken files
        raise InvalidRequestError("the picture is truncated or corrupt") from error


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise InvalidRequestError(
            f"the picture is {width}x{height}, {width * height} pixels; at most {max_pixels} "
            "are taken"
        )


def _plain_colours(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        levels = np.asarray(image.convert("I")).clip(0, 65_535) // 256
        image = Image.fromarray(levels.astype(np.uint8))
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def to_mask(picture: Image.Image) -> Image.Image:
    """An "L" picture, white where to repaint: where `picture` is transparent, or, if it has no
    alpha channel, where it is white."""
    if picture.mode == "RGBA":
        return ImageOps.invert(picture.getchannel("A"))
    return picture.convert("L")


class PictureSource:
    """Reads the pictures of a request, one after another, within the bounds for one and for all."""

    def __init__(self, settings: ApiSettings, workers: MediaWorkers, files: FileSource) -> None:
        self._settings = settings
        self._workers = workers
        self._files = files

    async def from_urls(self, urls: Sequence[tuple[str, str]]) -> list[Image.Image]:
        """`urls` are pairs of parameter name and `data:`, `https:` or `file:` URL."""
        try:
            async with asyncio.timeout(self._settings.media_timeout_s):
                return await self._read_all(
                    [(param, partial(self._files.load, url)) for param, url in urls]
                )
        except TimeoutError as error:
            raise InvalidRequestError(
                f"the input pictures did not arrive within {self._settings.media_timeout_s:g} s",
                param=urls[0][0],
            ) from error

    async def from_uploads(self, uploads: Sequence[tuple[str, ReadBytes]]) -> list[Image.Image]:
        """`uploads` are pairs of parameter name and a function that reads the file."""
        return await self._read_all(uploads)

    async def _read_all(self, sources: Sequence[tuple[str, ReadBytes]]) -> list[Image.Image]:
        settings = self._settings
        if len(sources) > settings.max_input_images:
            raise InvalidRequestError(
                f"{len(sources)} input pictures are over this server's limit of "
                f"{settings.max_input_images}",
                param=sources[0][0],
            )
        pictures: list[Image.Image] = []
        bytes_left, pixels_left = settings.max_body_bytes, settings.max_total_input_pixels
        for param, read in sources:
            try:
                data = await read()
                bytes_left -= len(data)
                self._check_bytes(len(data), bytes_left)
                picture = await self._workers.run_bounded(
                    decode_picture, data, max_pixels=min(settings.max_input_pixels, pixels_left)
                )
            except InvalidRequestError as error:
                error.param = error.param or param
                raise
            pixels_left -= picture.width * picture.height
            pictures.append(picture)
        return pictures

    def _check_bytes(self, size_bytes: int, left_bytes: int) -> None:
        if size_bytes > self._settings.max_media_bytes:
            raise PayloadTooLargeError(
                f"the picture has {size_bytes} bytes; at most {self._settings.max_media_bytes} "
                "are taken"
            )
        if left_bytes < 0:
            raise PayloadTooLargeError(
                f"the input pictures together have more than {self._settings.max_body_bytes} bytes"
            )
