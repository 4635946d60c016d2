"""What a request brings besides its parameters: texts, pictures, masks and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from omnistage.contracts.errors import InvalidRequestError, ProtocolError
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.contracts.tensors import host_tensor

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class DiffusionInputs:
    """`images` and `masks` are PIL pictures in order; `arrays` CPU tensors by parameter name."""

    prompt: str | None
    negative_prompt: str | None
    images: tuple[Image, ...]
    masks: tuple[Image, ...]
    arrays: dict[str, torch.Tensor]
    params: OmniDiffusionSamplingParams


def read_inputs(data: StageData) -> DiffusionInputs:
    """Take a command's payload apart: fields "prompt", "negative_prompt", "params"; tensors
    "image_0", "image_1" …, "mask_0" … (uint8, (height, width) or (height, width, 1, 3 or 4)), and
    the parameters' arrays. White in a mask is what changes. Raises `InvalidRequestError`."""
    try:
        params = msgspec.convert(data.fields["params"], OmniDiffusionSamplingParams)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"sampling parameters are malformed: {error}") from error
    names = OmniDiffusionSamplingParams.TENSOR_FIELDS
    return DiffusionInputs(
        prompt=_text(data.fields, "prompt"),
        negative_prompt=_text(data.fields, "negative_prompt"),
        images=_pictures(data.tensors, "image_", mode="RGB"),
        masks=_pictures(data.tensors, "mask_", mode="L"),
        arrays={name: _array(name, data.tensors[name]) for name in names if name in data.tensors},
        params=params,
    )


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise InvalidRequestError(f"{name} must be a text, got {type(value).__name__}", param=name)


def _pictures(tensors: Mapping[str, Any], prefix: str, mode: str) -> tuple[Image, ...]:
    """The pictures "<prefix>0", "<prefix>1" … without gaps, converted to a mode of PIL."""
    pictures: list[Image] = []
    while (name := f"{prefix}{len(pictures)}") in tensors:
        pictures.append(_picture(name, tensors[name]).convert(mode))
    return tuple(pictures)


def _picture(name: str, value: Any) -> Image:
    from PIL import Image

    pixels = np.array(host_tensor(value).numpy())
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    right_shape = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if pixels.dtype != np.uint8 or not right_shape:
        raise InvalidRequestError(
            f"{name} must be uint8 of shape (height, width, 1, 3 or 4), "
            f"got {pixels.dtype} {pixels.shape}",
            param=name,
        )
    return Image.fromarray(pixels)


def _array(name: str, value: Any) -> torch.Tensor:
    tensor = host_tensor(value).torch()
    if not tensor.is_floating_point() or not tensor.isfinite().all():
        raise InvalidRequestError(
            f"{name} must hold finite floating-point numbers, got dtype {tensor.dtype}", param=name
        )
    return tensor
