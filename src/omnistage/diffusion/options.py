"""What a deployment may set on a diffusion stage beyond the fields that every stage has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from omnistage.config.checks import suggestion
from omnistage.contracts.errors import ConfigurationError
from omnistage.contracts.sampling import MAX_GENERATED_PIXELS

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage


@dataclass(frozen=True, kw_only=True)
class DiffusionOptions:
    """`ResolvedStage.options` of a diffusion stage.

    `max_queued_requests` bounds the scheduler's queue. `max_pixels` bounds height x width of one
    picture. `image_input` says what the pipeline does with pictures: "optional", or "required" when
    it has nothing to do without one; `max_images` how many of them one request may bring.
    `vae_tiling` and `vae_slicing` None leave the checkpoint's setting. `attention_backend` is a
    name of `attention.registry`, None the library's default.

    `step_family` names the `StepFamily` of the model ("package.module:Name"), None where it has no
    step mode; `supports_request_batch` says that one call of the pipeline may serve several
    requests. Both are said by the model's folder. In step mode, `max_batch_shapes` different shapes
    may be under way at a time, and a request is overtaken at most `max_overtakes` times by others
    whose shape is. `guidance_in_one_batch` false computes guidance branches one after the other.

    On a GPU, unless `enforce_eager`: `warmup_sizes` ("1024x1024", width first) are compiled before
    the stage is ready; `graph_max_tokens` (batch x sequence) is the largest forward that is
    replayed from a captured graph, 0 for none; `max_graphs` how many graphs are kept;
    `coordinate_descent` lets the compiler try more variants of reductions.
    """

    max_queued_requests: int = 4096
    max_pixels: int = MAX_GENERATED_PIXELS
    image_input: str = "optional"
    max_images: int = 1
    vae_tiling: bool | None = None
    vae_slicing: bool | None = None
    attention_backend: str | None = None
    step_family: str | None = None
    supports_request_batch: bool = False
    max_batch_shapes: int = 4
    max_overtakes: int = 16
    guidance_in_one_batch: bool = True
    warmup_sizes: Sequence[str] = ()
    graph_max_tokens: int = 4096
    max_graphs: int = 16
    coordinate_descent: bool = True

    @property
    def warmup_shapes(self) -> list[tuple[int, int]]:
        """(height, width) of each of `warmup_sizes`."""
        pairs = [size.split("x") for size in self.warmup_sizes]
        return [(int(height), int(width)) for width, height in pairs]


_POSITIVE = (
    "max_queued_requests",
    "max_pixels",
    "max_images",
    "max_batch_shapes",
    "max_overtakes",
    "max_graphs",
)
_SWITCHES = ("supports_request_batch", "guidance_in_one_batch", "coordinate_descent")
_SIZE = re.compile(r"[1-9]\d{0,4}x[1-9]\d{0,4}")


def runs_steps(stage: ResolvedStage) -> bool:
    """Whether a diffusion stage runs in step mode: previews need it."""
    return stage.step_execution or stage.diffusion_streaming_output


def read_options(values: Mapping[str, Any]) -> DiffusionOptions:
    """Raises `ConfigurationError` for an unknown key (naming the nearest) or a wrong value."""
    known = [field.name for field in fields(DiffusionOptions)]
    for key in values:
        if key not in known:
            raise ConfigurationError(
                f"unknown option {key!r} of a diffusion stage; {suggestion(key, known)}"
            )
    options = DiffusionOptions(**values)
    for name in _POSITIVE:
        _check_integer(options, name, least=1, what="a positive integer")
    _check_integer(options, "graph_max_tokens", least=0, what="an integer, 0 or more")
    for name in ("vae_tiling", "vae_slicing"):
        value = getattr(options, name)
        if not isinstance(value, bool | None):
            raise ConfigurationError(f"option {name} must be true or false, got {value!r}")
    for name in _SWITCHES:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ConfigurationError(f"option {name} must be true or false, got {value!r}")
    if options.image_input not in ("optional", "required"):
        raise ConfigurationError(
            f"option image_input must be 'optional' or 'required', got {options.image_input!r}"
        )
    _check_sizes(options.warmup_sizes)
    return options


def _check_integer(options: DiffusionOptions, name: str, *, least: int, what: str) -> None:
    value = getattr(options, name)
    if type(value) is not int or value < least:
        raise ConfigurationError(f"option {name} must be {what}, got {value!r}")


def _check_sizes(sizes: Any) -> None:
    is_list = isinstance(sizes, list | tuple)
    if not is_list or not all(isinstance(one, str) and _SIZE.fullmatch(one) for one in sizes):
        raise ConfigurationError(
            f"option warmup_sizes must be a list like ['1024x1024'], got {sizes!r}"
        )
