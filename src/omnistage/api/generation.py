"""From a validated request to finished pictures: the only place where a route meets the engine."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request
from PIL.Image import Image

from omnistage.api.context import AppContext
from omnistage.api.limits import ImageSize
from omnistage.api.protocol.base import DiffusionKnobs
from omnistage.contracts.errors import InternalError, RequestCancelledError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import (
    PARTIAL_IMAGE_INDEX,
    FinishReason,
    OmniProgress,
    OmniRequestOutput,
)
from omnistage.contracts.requests import OmniPrompt
from omnistage.contracts.sampling import OmniDiffusionSamplingParams

_GENERATED_SEEDS = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageJob:
    """A request for `n` pictures as the engine takes it. `inputs` are the pictures to start from,
    `mask` marks what to repaint (white) in the first of them."""

    prompt: str
    params: OmniDiffusionSamplingParams
    negative_prompt: str | None = None
    inputs: list[Image] = field(default_factory=list)
    mask: Image | None = None

    def engine_prompt(self) -> OmniPrompt:
        prompt = OmniPrompt(prompt=self.prompt)
        if self.negative_prompt is not None:
            prompt["negative_prompt"] = self.negative_prompt
        pictures: dict[str, object] = {}
        if self.inputs:
            pictures["image"] = self.inputs
        if self.mask is not None:
            pictures["mask"] = self.mask
        if pictures:
            prompt["multi_modal_data"] = pictures
        return prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """All pictures of a request as they look by now; `index` counts a request's previews."""

    index: int
    images: list[Image]


def diffusion_params(
    knobs: DiffusionKnobs,
    *,
    n: int,
    size: ImageSize | None,
    quality: str | None = None,
    partial_images: int | None = 0,
) -> OmniDiffusionSamplingParams:
    """Sparse parameters, but always with a seed, so that the answer can name it.

    Where `partial_images` is 0, a deployment's default makes no previews that nobody gets.
    """
    return OmniDiffusionSamplingParams(
        num_outputs_per_prompt=n,
        seed=secrets.randbelow(_GENERATED_SEEDS) if knobs.seed is None else knobs.seed,
        width=size[0] if size else None,
        height=size[1] if size else None,
        num_inference_steps=knobs.num_inference_steps,
        guidance_scale=knobs.guidance_scale,
        true_cfg_scale=knobs.true_cfg_scale,
        strength=knobs.strength,
        quality=None if quality == "auto" else quality,
        partial_images=partial_images,
    )


async def run_job(
    context: AppContext, request: Request, job: ImageJob
) -> AsyncGenerator[OmniProgress | Preview | list[Image], None]:
    """Yield progress and previews, then, last, the finished pictures. Closing the generator aborts
    the request.

    Raises `OmniError`; never ends without pictures.
    """
    context.lifecycle.check_serving()
    finished: list[Image] = []
    events = context.engine.generate(
        job.engine_prompt(),
        job.params,
        request.state.engine_request_id,
        output_modalities=[Modality.IMAGE],
        trace_context=request.state.trace_context,
    )
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if event.progress is not None:
                yield event.progress
            if event.is_preview:
                yield Preview(index=event.fields[PARTIAL_IMAGE_INDEX], images=event.images)
            finished = _pictures(event) or finished
    if not finished:
        raise InternalError("the model finished without a picture")
    context.engine.metrics.images_generated(len(finished))
    yield finished


def _pictures(event: OmniRequestOutput) -> list[Image]:
    if event.error is not None:
        raise event.error
    if event.finish_reason is FinishReason.ABORT:
        raise RequestCancelledError("the request was aborted")
    return [] if event.partial else event.images


async def finished_images(context: AppContext, request: Request, job: ImageJob) -> list[Image]:
    async with aclosing(run_job(context, request, job)) as events:
        async for event in events:
            if isinstance(event, list):
                return event
    raise InternalError("the request ended without a result")
