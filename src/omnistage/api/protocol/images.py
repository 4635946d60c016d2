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
