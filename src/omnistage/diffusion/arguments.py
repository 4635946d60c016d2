"""From a request to the keyword arguments of a pipeline's call, checked against its signature.

Nothing that a caller sets is dropped in silence: a parameter the pipeline does not take, or would
ignore, is an error that says so. Defaults of the deployment that a pipeline does not take are left
out, for they are nobody's wish in particular.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError
from omnistage.contracts.sampling import (
    QUALITY_STEPS,
    OmniDiffusionSamplingParams,
    steps_of_quality,
)
from omnistage.diffusion.inputs import DiffusionInputs
from omnistage.diffusion.options import DiffusionOptions
from omnistage.diffusion.signature import OWNED_BY_RUNTIME, CallSignature, signature_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

OUTPUT_TYPES = ("pil", "np", "pt", "latent")

_COUNTS = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "num_outputs_per_prompt",
    "max_sequence_length",
)

RUNTIME_PARAMETERS = frozenset(
    {
        "seed",
        "generator_device",
        "scheduler",
        "flow_shift",
        "vae_tiling",
        "vae_slicing",
        "output_type",
        "quality",
        "partial_images",
        "extra_args",
    }
)
"""Parameters that the runtime itself acts on."""


def call_arguments(
    pipeline: DiffusionPipeline,
    inputs: DiffusionInputs,
    options: DiffusionOptions,
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything but generator, pictures and output type. `defaults` are the stage's.

    Raises `InvalidRequestError` naming the parameter.
    """
    signature = signature_of(type(pipeline))
    check_values(inputs.params, options)
    arguments: dict[str, Any] = {}
    for name, value in _set_parameters(inputs.params).items():
        spelled = signature.spelling(name)
        if spelled is not None:
            arguments[spelled] = value
        elif value != defaults.get(name):
            raise signature.refuse(name)
    for name, value in inputs.arrays.items():
        if name not in signature:
            raise signature.refuse(name)
        arguments[name] = value
    _apply_quality(arguments, inputs.params.quality, signature)
    _add_extra(arguments, inputs.params.extra_args, defaults.get("extra_args", {}), signature)
    _check_size(pipeline, arguments)
    _add_texts(arguments, inputs, signature)
    _check_guidance(pipeline, arguments, inputs, defaults, signature)
    _drop_idle_default(arguments, defaults)
    return arguments


def _drop_idle_default(arguments: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Without guidance a default negative prompt does nothing, and `diffusers` warns about it."""
    text = defaults.get("extra_args", {}).get("negative_prompt")
    scale = arguments.get("true_cfg_scale")
    if scale is not None and scale <= 1 and arguments.get("negative_prompt") == text:
        arguments.pop("negative_prompt", None)


def steps_of(arguments: Mapping[str, Any]) -> Any:
    """How many steps a call with these arguments takes: a schedule of one's own tells."""
    for name in ("sigmas", "timesteps"):
        if arguments.get(name) is not None:
            return len(arguments[name])
    return arguments["num_inference_steps"]


def check_values(params: OmniDiffusionSamplingParams, options: DiffusionOptions) -> None:
    """Raises `InvalidRequestError` for values that no pipeline can work with."""
    for name in _COUNTS:
        value = getattr(params, name)
        if value is not None and value < 1:
            raise InvalidRequestError(f"{name} must be at least 1, got {value}", param=name)
    for name in ("sigmas", "timesteps"):
        if getattr(params, name) == []:
            raise InvalidRequestError(f"{name} must hold at least one number", param=name)
    for name, value in _set_parameters(params).items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise InvalidRequestError(f"{name} must be finite, got {value}", param=name)
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise InvalidRequestError(f"seed must fit in 64 bits, got {params.seed}", param="seed")
    if params.output_type not in (None, *OUTPUT_TYPES):
        raise InvalidRequestError(
            f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {params.output_type!r}",
            param="output_type",
        )
    if (params.height or 1) * (params.width or 1) > options.max_pixels:
        raise InvalidRequestError(
            f"{params.width} x {params.height} is more than the {options.max_pixels} pixels "
            "this server allows",
            param="height" if params.height else "width",
        )


def _check_size(pipeline: DiffusionPipeline, arguments: Mapping[str, Any]) -> None:
    """Sizes are cut down to a multiple of what the image processor says: not to nothing."""
    from diffusers.image_processor import VaeImageProcessor

    processor = getattr(pipeline, "image_processor", None)
    if not isinstance(processor, VaeImageProcessor):
        return
    least = processor.config["vae_scale_factor"]
    for name in ("height", "width"):
        value = arguments.get(name)
        if isinstance(value, int) and value < least:
            raise InvalidRequestError(
                f"{name} must be at least {least} for this model, got {value}", param=name
            )


def _apply_quality(
    arguments: dict[str, Any], quality: str | None, signature: CallSignature
) -> None:
    """Scale the pipeline's own number of steps; any other has already used `quality` up."""
    if quality is None or QUALITY_STEPS.get(quality) == 1.0:
        return
    default = signature.default("num_inference_steps")
    if not isinstance(default, int):
        raise signature.refuse("quality")
    arguments["num_inference_steps"] = steps_of_quality(quality, default)


def _set_parameters(params: OmniDiffusionSamplingParams) -> dict[str, Any]:
    """What was asked for, less what the runtime handles itself."""
    values = {name: getattr(params, name) for name in _call_parameters()}
    return {name: value for name, value in values.items() if value != _call_parameters()[name]}


@cache
def _call_parameters() -> dict[str, Any]:
    """Sampling parameters that belong to the call, with their defaults."""
    fields = msgspec.structs.fields(OmniDiffusionSamplingParams)
    return {one.name: one.default for one in fields if one.name not in RUNTIME_PARAMETERS}


def _add_extra(
    arguments: dict[str, Any],
    extra: Mapping[str, Any],
    defaults: Mapping[str, Any],
    signature: CallSignature,
) -> None:
    for name, value in extra.items():
        if name in OWNED_BY_RUNTIME:
            raise InvalidRequestError(
                f"extra_args must not contain {name!r}: the runtime sets it", param="extra_args"
            )
        is_default = name in defaults and defaults[name] == value
        if name in signature and not (is_default and name in arguments):
            if name in arguments:
                raise InvalidRequestError(
                    f"{name} is given twice, as a parameter and in extra_args", param=name
                )
            arguments[name] = value
        elif not is_default:
            raise signature.refuse(name)


def _add_texts(
    arguments: dict[str, Any], inputs: DiffusionInputs, signature: CallSignature
) -> None:
    for name in ("prompt", "negative_prompt"):
        text = getattr(inputs, name)
        if text is None:
            continue
        if name not in signature:
            raise signature.refuse(name)
        arguments[name] = text
    if "prompt" in signature and inputs.prompt is None:
        raise InvalidRequestError("the prompt is missing", param="prompt")


def _check_guidance(
    pipeline: DiffusionPipeline,
    arguments: Mapping[str, Any],
    inputs: DiffusionInputs,
    defaults: Mapping[str, Any],
    signature: CallSignature,
) -> None:
    """Pipelines with both kinds of guidance ignore each where the other conditions are missing.

    `true_cfg_scale` runs the model a second time and needs a negative prompt; `guidance_scale` is
    an input of the model there, which only guidance-distilled ones have.
    """
    if "true_cfg_scale" not in signature:
        return
    scale = arguments.get("true_cfg_scale", signature.default("true_cfg_scale"))
    scale_is_asked = inputs.params.true_cfg_scale not in (None, defaults.get("true_cfg_scale"))
    if scale_is_asked and scale > 1 and arguments.get("negative_prompt") is None:
        raise UnsupportedCombinationError(
            f"true_cfg_scale={scale} has no effect without a negative_prompt; pass one "
            '(an empty text "" will do)',
            param="true_cfg_scale",
        )
    if inputs.negative_prompt and not scale_is_asked and (scale is None or scale <= 1):
        raise UnsupportedCombinationError(
            f"negative_prompt has no effect at true_cfg_scale={scale}; set true_cfg_scale above 1",
            param="negative_prompt",
        )
    asked = inputs.params.guidance_scale
    if asked in (None, defaults.get("guidance_scale")) or asked <= 1:
        return
    config = getattr(getattr(pipeline, "transformer", None), "config", None)
    if config is not None and config.get("guidance_embeds") is False:
        raise UnsupportedCombinationError(
            f"guidance_scale={asked} has no effect: this model has no guidance embedding; "
            "use true_cfg_scale with a negative_prompt",
            param="guidance_scale",
        )
