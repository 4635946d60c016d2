"""Bodies of `/v1/images/*`: OpenAI's fields and our own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from omnistage.api.protocol.base import (
    NO_NUL,
    DiffusionKnobs,
    ModelName,
    PromptText,
    ResponseModel,
    Size,
)
from omnistage.contracts.sampling import MAX_PARTIAL_IMAGES

OutputFormat = Literal["png", "jpeg", "webp"]


class ImageFields(DiffusionKnobs):
    """What generating and editing have in common."""

    prompt: PromptText
    model: ModelName | None = None
    n: Annotated[int, Field(ge=1, le=10_000)] = 1
    size: Size | None = None
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: OutputFormat = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    quality: Literal["auto", "low", "medium", "high", "standard", "hd"] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    user: Annotated[str, Field(max_length=512), NO_NUL] | None = None
    stream: bool | None = None
    partial_images: (
        Annotated[
            int,
            Field(
                ge=0,
                le=MAX_PARTIAL_IMAGES,
                description="How many previews a stream shows; with `stream` only.",
            ),
        ]
        | None
    ) = None


class ImageGenerationRequest(ImageFields):
    """`POST /v1/images/generations`."""


class ImageEditForm(ImageFields):
    """The text fields of `POST /v1/images/edits`, whose values arrive as strings."""

    model_config = ConfigDict(strict=False)


class ImageData(ResponseModel):
    """One picture: `b64_json`, or `url` with a `data:` URL when that was asked for."""

    b64_json: str | None = None
    url: str | None = None


class ImagesResponse(ResponseModel):
    """`seed` reproduces the pictures; `size` is that of the first one."""

    created: int
    data: list[ImageData]
    output_format: OutputFormat
    size: str
    seed: int


class _ImageEvent(ResponseModel):
    """`size` is that of this picture, `image_index` its place among the `n` pictures."""

    b64_json: str
    background: Literal["auto", "opaque"]
    created_at: int
    output_format: OutputFormat
    quality: Literal["auto", "low", "medium", "high"]
    size: str
    image_index: int


class ImagePartialEvent(_ImageEvent):
    """A preview: how a picture looks by now. A later event of its `image_index` replaces it."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    partial_image_index: int


class UsageDetails(ResponseModel):
    image_tokens: int
    text_tokens: int


class Usage(ResponseModel):
    """All 0: pictures cost no tokens here."""

    input_tokens: int
    input_tokens_details: UsageDetails
    output_tokens: int
    total_tokens: int


class ImageCompletedEvent(_ImageEvent):
    """A finished picture, one event for each of `n`. `seed` reproduces them."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    seed: int
    usage: Usage
