"""From a pipeline's result to the payload that leaves the stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage.contracts.errors import InternalError

if TYPE_CHECKING:
    import torch


def pictures(result: Any, output_type: str) -> np.ndarray | torch.Tensor:
    """The pipeline's pictures, n of them, on the host and bit for bit as it made them.

    "pil": uint8 (n, height, width, 3), or 4 channels with transparency; "np": float (n, height,
    width, channels); "pt": float (n, channels, height, width); "latent": as the pipeline has them.
    """
    images = getattr(result, "images", None)
    if images is None:
        images = getattr(result, "image", None)  # Kandinsky 5
    if images is None:
        raise InternalError(f"the pipeline returned no images but {type(result).__name__}")
    if output_type == "pil":
        return np.stack([_pixels(image) for image in _flatten(images)])
    if isinstance(images, list):
        images = _stack(images)
    return images if isinstance(images, np.ndarray) else images.detach().to("cpu")


def is_finite(images: np.ndarray | torch.Tensor) -> bool:
    if isinstance(images, np.ndarray):
        return images.dtype == np.uint8 or bool(np.isfinite(images).all())
    return bool(images.isfinite().all())


def size_fields(images: np.ndarray | torch.Tensor, output_type: str) -> dict[str, int]:
    """Height and width in pixels; nothing for latents, whose layout is the model's own."""
    if output_type == "latent":
        return {}
    first = 2 if output_type == "pt" else 1
    return {"height": images.shape[first], "width": images.shape[first + 1]}


def _stack(images: Sequence[Any]) -> Any:
    if isinstance(images[0], np.ndarray):
        return np.stack(images)
    import torch

    return torch.stack(list(images))


def _flatten(images: Any) -> Iterator[Any]:
    """Pipelines that make layers return a list of lists."""
    for image in images:
        if isinstance(image, list):
            yield from _flatten(image)
        else:
            yield image


def _pixels(image: Any) -> np.ndarray:
    """Grey pictures become RGB; RGB and RGBA stay as they are."""
    return np.asarray(image if image.mode in ("RGB", "RGBA") else image.convert("RGB"))
