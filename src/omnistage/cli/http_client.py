"""Asking a server for pictures, as any client would."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import ConfigurationError, OmniError, UnavailableError

if TYPE_CHECKING:
    import httpx
    from PIL.Image import Image

GENERATIONS = "/v1/images/generations"


def read_pictures(response: httpx.Response) -> list[bytes]:
    """The files in an answer. Raises `UnavailableError` with what the server said instead."""
    if response.status_code != 200:
        raise UnavailableError(
            f"the server answered {response.status_code}: {error_message(response)}"
        )
    return [base64.b64decode(entry["b64_json"]) for entry in response.json()["data"]]


def error_message(response: httpx.Response) -> str:
    """The message of an OpenAI-style error body, or the start of whatever came."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def open_picture(data: bytes) -> Image:
    """Decode a whole picture. Raises `UnavailableError` for what is none."""
    from PIL import Image, UnidentifiedImageError

    picture = Image.open(io.BytesIO(data))
    try:
        picture.load()
    except (OSError, UnidentifiedImageError) as error:
        raise UnavailableError("the server sent something that is no picture") from error
    return picture


def unreachable(url: str, error: Exception) -> OmniError:
    return ConfigurationError(
        f"no server answers at {url} ({type(error).__name__}); start one with "
        "`omnistage serve MODEL`, or leave the URL out to have one started"
    )


def generation_body(prompt: str, **fields: Any) -> dict[str, Any]:
    given = {name: value for name, value in fields.items() if value is not None}
    return {"prompt": prompt, "response_format": "b64_json"} | given
