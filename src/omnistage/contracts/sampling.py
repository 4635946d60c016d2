"""Sampling parameters: what a caller may ask of a stage, by kind of stage.

Parameters are sparse: None means "the model's default", which the deploy configuration or the
pipeline's own signature supplies. Nothing downstream re-defaults.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, get_type_hints

import msgspec

from omnistage.contracts.errors import InvalidRequestError

MAX_PARTIAL_IMAGES = 3
"""OpenAI's bound on the previews of one request."""


class OmniDiffusionSamplingParams(
    msgspec.Struct, kw_only=True, tag="diffusion", omit_defaults=True, forbid_unknown_fields=True
):
    """Parameters of a diffusion stage. Names are those of `diffusers` pipelines.

    `latents`, `audio_latents` and `image_latent` take numpy arrays or torch tensors; `sigmas` and
    `timesteps` lists of floats; sizes are pixels, `fps` frames a second. `seed` makes a CPU
    `torch.Generator` per request; output i of `num_outputs_per_prompt` draws from the same
    generator after output i-1, as `diffusers` does for one generator.
    `quality` scales the default number of steps (`QUALITY_STEPS`) where none is given.
    `extra_args` are passed to the pipeline's call unchanged and checked against its signature.
    """

    # text and output
    max_sequence_length: int | None = None
    do_classifier_free_guidance: bool | None = None
    output_type: str | None = None
    quality: str | None = None
    # batch
    num_outputs_per_prompt: int = 1
    seed: int | None = None
    generator_device: str | None = None
    # previews
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    """How many previews the stage emits before its final output. Each is a partial output: uint8
    (n, height, width, 3) under "images", with "partial_image_index" (from 0), "step" and
    "total_steps" in its fields. None and 0: no previews."""
    # latents
    latents: Any = None
    audio_latents: Any = None
    image_latent: Any = None
    # shape
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    # schedule
    timesteps: list[float] | None = None
    sigmas: list[float] | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    guidance_rescale: float | None = None
    true_cfg_scale: float | None = None
    cfg_normalize: bool | None = None
    strength: float | None = None
    boundary_ratio: float | None = None
    eta: float | None = None
    scheduler: str | None = None
    """Class name of a compatible `diffusers` scheduler, built from the model's own config."""
    flow_shift: float | None = None
    # memory
    vae_tiling: bool | None = None
    vae_slicing: bool | None = None
    # everything else the pipeline's call accepts
    extra_args: dict[str, Any] = {}

    TENSOR_FIELDS = ("latents", "audio_latents", "image_latent")


MAX_GENERATED_PIXELS = 7680 * 4320
"""Height x width of one picture, where a deployment sets no other bound."""

QUALITY_STEPS = {
    "auto": 1.0,
    "standard": 1.0,
    "medium": 1.0,
    "low": 0.5,
    "high": 2.0,
    "hd": 2.0,
}
"""What OpenAI's `quality` means here: a factor on the model's default number of steps."""


def steps_of_quality(quality: str, default_steps: int) -> int:
    """Raises `InvalidRequestError` for a quality that is none of `QUALITY_STEPS`."""
    if quality not in QUALITY_STEPS:
        raise InvalidRequestError(
            f"quality must be one of {', '.join(QUALITY_STEPS)}, got {quality!r}", param="quality"
        )
    return max(1, round(default_steps * QUALITY_STEPS[quality]))


class StructuredOutput(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What a generated text must be: exactly one of these. `json_schema` is a JSON schema as text,
    `json_object` any JSON object, `regex` a regular expression for the whole text, `grammar` a
    Lark grammar, `choice` one of some strings."""

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


class OmniTokenSamplingParams(
    msgspec.Struct, kw_only=True, tag="token", omit_defaults=True, forbid_unknown_fields=True
):
    """Parameters of a token stage. Names and meanings are those of OpenAI's and vLLM's APIs.

    `temperature` 0 is greedy; `top_k` 0 or -1 keeps all. `logprobs` is how many of the most likely
    tokens to report beside the sampled one (0: that one only). `delta`: what is generated leaves as
    it comes; False: once, at the end. `stop` strings are not part of the text unless
    `include_stop_str_in_output`. Without a `seed` one is drawn.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    structured: StructuredOutput | None = None
    skip_special_tokens: bool = True
    delta: bool = True
    extra_args: dict[str, Any] = {}


class GenericParams(
    msgspec.Struct, kw_only=True, tag="generic", omit_defaults=True, forbid_unknown_fields=True
):
    """Parameters of a stage of any other kind: passed to its runtime as they are."""

    extra_args: dict[str, Any] = {}


SamplingParams = OmniDiffusionSamplingParams | OmniTokenSamplingParams | GenericParams


def merge_defaults(params: SamplingParams, defaults: dict[str, Any]) -> SamplingParams:
    """Fill what the caller left open from `defaults`; the caller's own values always win, a number
    of steps also over a `quality`. Where the steps are a default, `quality` scales them here:
    merging the same defaults again changes nothing.

    Raises `InvalidRequestError` when a default names no field, or a value of the caller's has
    another type than its field: structs do not look when they are made, and the process that
    decodes them must not be the first that does.
    """
    _refuse_wrong_types(params)
    changes: dict[str, Any] = {}
    unset = {f.name: f.default for f in msgspec.structs.fields(params)}
    for name, value in defaults.items():
        if name == "extra_args":
            changes["extra_args"] = {**value, **params.extra_args}
        elif name not in unset:
            raise InvalidRequestError(f"default sampling parameter {name!r} does not exist")
        elif getattr(params, name) == unset[name]:
            changes[name] = value
    if isinstance(params, OmniDiffusionSamplingParams):
        changes |= _scaled_steps(params, changes)
    return msgspec.structs.replace(params, **changes) if changes else params


def _scaled_steps(params: OmniDiffusionSamplingParams, changes: dict[str, Any]) -> dict[str, Any]:
    """What `quality` comes to, once there is a number of steps: then it is spent."""
    if params.num_inference_steps is not None:
        return {"quality": None}
    quality, steps = changes.get("quality", params.quality), changes.get("num_inference_steps")
    if quality is None or steps is None:
        return {}
    return {"num_inference_steps": steps_of_quality(quality, steps), "quality": None}


def _refuse_wrong_types(params: SamplingParams) -> None:
    for name, expected in _field_types(type(params)).items():
        value = getattr(params, name)
        try:
            msgspec.convert(value, expected)
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "").replace("Expected", "expected")
            raise InvalidRequestError(f"{name} is {value!r}: {reason}", param=name) from None


@cache
def _field_types(kind: type[SamplingParams]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__ if hints[name] is not Any}
