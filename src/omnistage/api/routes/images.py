"""`POST /v1/images/generations` and `/v1/images/edits`."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from PIL.Image import Image
from starlette.responses import Response

from omnistage.api.body import read_json
from omnistage.api.context import AppContext, context_of
from omnistage.api.disconnect import until_disconnect
from omnistage.api.edit_form import EDIT_FORM_BODY, read_edit_form
from omnistage.api.generation import ImageJob, diffusion_params, finished_images
from omnistage.api.image_stream import ImageEvents, Operation, image_stream
from omnistage.api.limits import check_limits, check_output, parse_size
from omnistage.api.openapi import json_body
from omnistage.api.protocol.images import ImageFields, ImageGenerationRequest, ImagesResponse
from omnistage.api.render import encode_image, to_base64, to_data_url
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError

router = APIRouter()

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "string",
                    "description": "With `stream`: events whose data is an `ImagePartialEvent` or "
                    "an `ImageCompletedEvent`; or, last, `error` with an `ErrorResponse`.",
                }
            }
        }
    }
}


@router.post(
    "/v1/images/generations",
    response_model=ImagesResponse,
    responses=_ANSWERS,
    summary="Make pictures from a prompt",
    openapi_extra=json_body(ImageGenerationRequest),
)
async def generate_images(request: Request) -> Response:
    context = context_of(request)
    body = await read_json(request, ImageGenerationRequest)
    job = image_job(context, body)
    return await _answer(context, request, body, job, "image_generation")


@router.post(
    "/v1/images/edits",
    response_model=ImagesResponse,
    responses=_ANSWERS,
    summary="Change pictures as a prompt says",
    openapi_extra=EDIT_FORM_BODY,
)
async def edit_images(request: Request) -> Response:
    context = context_of(request)
    context.lifecycle.check_serving()
    form = await read_edit_form(request)
    job = image_job(context, form.fields, inputs=form.images, mask=form.mask)
    return await _answer(context, request, form.fields, job, "image_edit")


def image_job(
    context: AppContext,
    fields: ImageFields,
    *,
    inputs: list[Image] | None = None,
    mask: Image | None = None,
) -> ImageJob:
    """Check everything that can be known before the engine is asked."""
    context.lifecycle.check_serving()
    context.check_model(fields.model)
    context.check_makes_images()
    _check_supported(fields)
    size = parse_size(fields.size)
    check_limits(context.settings, prompt=fields.prompt, n=fields.n, knobs=fields, size=size)
    return ImageJob(
        prompt=fields.prompt,
        negative_prompt=fields.negative_prompt,
        params=diffusion_params(
            fields,
            n=fields.n,
            size=size,
            quality=fields.quality,
            partial_images=fields.partial_images if fields.stream else 0,
        ),
        inputs=inputs or [],
        mask=mask,
    )


def _check_supported(fields: ImageFields) -> None:
    if fields.partial_images is not None and not fields.stream:
        raise UnsupportedCombinationError(
            f"partial_images {fields.partial_images} needs stream: true; an answer in one piece "
            "has no previews",
            param="partial_images",
        )
    if fields.stream and fields.response_format == "url":
        raise UnsupportedCombinationError(
            "response_format 'url' cannot be streamed; allowed with stream: 'b64_json'",
            param="response_format",
        )
    if fields.background == "transparent":
        raise InvalidRequestError(
            "background: 'transparent' is not offered; allowed: 'auto', 'opaque'",
            param="background",
        )
    check_output(fields.output_format, fields.output_compression)


async def _answer(
    context: AppContext,
    request: Request,
    fields: ImageFields,
    job: ImageJob,
    operation: Operation,
) -> Response:
    if fields.stream:
        render = ImageEvents(operation=operation, fields=fields, seed=job.params.seed)
        return image_stream(context, request, job, render)
    return await until_disconnect(request.receive, _whole(context, request, fields, job))


async def _whole(
    context: AppContext, request: Request, fields: ImageFields, job: ImageJob
) -> Response:
    images = await finished_images(context, request, job)
    body = await context.workers.run(partial(_render, images, fields, seed=job.params.seed))
    return Response(body, media_type="application/json")


def _render(images: list[Image], fields: ImageFields, *, seed: int | None) -> bytes:
    answer = {
        "created": int(time.time()),
        "data": [_render_one(image, fields) for image in images],
        "output_format": fields.output_format,
        "size": f"{images[0].width}x{images[0].height}",
        "seed": seed,
    }
    return json.dumps(answer).encode()


def _render_one(image: Image, fields: ImageFields) -> dict[str, Any]:
    data = encode_image(image, fields.output_format, compression=fields.output_compression)
    if fields.response_format == "url":
        return {"url": to_data_url(data, fields.output_format)}
    return {"b64_json": to_base64(data)}
