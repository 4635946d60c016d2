"""What a deployment may set on a diffusion stage beyond the fields that every stage has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import ConfigurationError
from omnistage.contracts.sampling import MAX_GENERATED_PIXELS


@dataclass(frozen=True, kw_only=True)
class DiffusionOptions:
    """`ResolvedStage.options` of a diffusion stage.

    `execution_mode` picks the scheduler, `max_queued_requests` bounds its queue. `max_pixels`
    bounds height x width of one picture. `image_input` says what the pipeline does with pictures:
    "optional", or "required" when it has nothing to do without one; `max_images` how many of them
    one request may bring. `vae_tiling` and `vae_slicing` None leave the checkpoint's setting.
    `attention_backend` is a name of `attention.registry`, None the library's default.
    """

    execution_mode: str = "request"
    max_queued_requests: int = 4096
    max_pixels: int = MAX_GENERATED_PIXELS
    image_input: str = "optional"
    max_images: int = 1
    vae_tiling: bool | None = None
    vae_slicing: bool | None = None
    attention_backend: str | None = None


_INTEGERS = ("max_queued_requests", "max_pixels", "max_images")


def read_options(values: Mapping[str, Any]) -> DiffusionOptions:
    """Raises `ConfigurationError` for an unknown key (naming the nearest) or a wrong value."""
    known = [field.name for field in fields(DiffusionOptions)]
    for key in values:
        if key not in known:
            raise ConfigurationError(
                f"unknown option {key!r} of a diffusion stage; {suggestion(key, known)}"
            )
    options = DiffusionOptions(**values)
    for name in _INTEGERS:
        value = getattr(options, name)
        if type(value) is not int or value < 1:
            raise ConfigurationError(f"option {name} must be a positive integer, got {value!r}")
    for name in ("vae_tiling", "vae_slicing"):
        value = getattr(options, name)
        if not isinstance(value, bool | None):
            raise ConfigurationError(f"option {name} must be true or false, got {value!r}")
    if options.image_input not in ("optional", "required"):
        raise ConfigurationError(
            f"option image_input must be 'optional' or 'required', got {options.image_input!r}"
        )
    return options
