"""The bounds that depend on the deployment, each with its own message."""

from __future__ import annotations

from omnistage.api.protocol.base import DiffusionKnobs
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError

ImageSize = tuple[int, int]
"""Width and height in pixels."""


def parse_size(size: str | None) -> ImageSize | None:
    """`"640x480"` → (640, 480); "auto" and None leave it to the model."""
    if size is None or size == "auto":
        return None
    width, _, height = size.partition("x")
    return int(width), int(height)


def check_bound(name: str, value: int | None, bound: int, what: str) -> None:
    if value is not None and value > bound:
        raise InvalidRequestError(
            f"{name}: {value} is over this server's limit of {bound} {what}", param=name
        )


def check_output(output_format: str, compression: int | None) -> None:
    if output_format == "png" and compression not in (None, 100):
        raise UnsupportedCombinationError(
            "output_compression needs output_format 'jpeg' or 'webp'; png loses nothing",
            param="output_compression",
        )


def check_limits(
    settings: ApiSettings, *, prompt: str, n: int, knobs: DiffusionKnobs, size: ImageSize | None
) -> None:
    """Raises `InvalidRequestError` naming the field, its value and the limit."""
    check_bound("n", n, settings.max_n, "pictures a request")
    steps = knobs.num_inference_steps
    check_bound("num_inference_steps", steps, settings.max_steps, "steps")
    for name, text in (("prompt", prompt), ("negative_prompt", knobs.negative_prompt or "")):
        if len(text) > settings.max_prompt_chars:
            raise InvalidRequestError(
                f"{name}: {len(text)} characters are over this server's limit of "
                f"{settings.max_prompt_chars}",
                param=name,
            )
    if size is not None and size[0] * size[1] > settings.max_pixels:
        raise InvalidRequestError(
            f"size: {size[0]}x{size[1]} has {size[0] * size[1]} pixels, over this server's limit "
            f"of {settings.max_pixels}",
            param="size",
        )
