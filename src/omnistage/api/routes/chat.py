"""`POST /v1/chat/completions` of a model that answers with pictures."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from PIL.Image import Image
from starlette.responses import Response

from omnistage.api.body import read_json
from omnistage.api.context import AppContext, context_of
from omnistage.api.disconnect import until_disconnect
from omnistage.api.event_stream import DONE, EventStream, data_event, progress_comment
from omnistage.api.generation import ImageJob, diffusion_params, finished_images, run_job
from omnistage.api.limits import ImageSize, check_limits, check_output, parse_size
from omnistage.api.openapi import json_body
from omnistage.api.protocol.chat import ChatRequest, ChatResponse, ImagePart, Message, TextPart
from omnistage.api.render import encode_image, to_data_url
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError
from omnistage.contracts.outputs import OmniProgress

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    summary="Answer a conversation with a picture",
    openapi_extra=json_body(ChatRequest),
)
async def complete_chat(request: Request) -> Response:
    context = context_of(request)
    body = await read_json(request, ChatRequest)
    return await until_disconnect(request.receive, _complete(context, request, body))


async def _complete(context: AppContext, request: Request, body: ChatRequest) -> Response:
    job = await _chat_job(context, body)
    answer = _Answer(
        id=f"chatcmpl-{request.state.request_id}",
        created_unix_s=int(time.time()),
        model=context.model_name,
        body=body,
        seed=job.params.seed,
    )
    if body.stream:
        return EventStream(
            _stream(context, request, job, answer),
            slow_client_timeout_s=context.engine.config.limits.slow_client_timeout_s,
        )
    images = await finished_images(context, request, job)
    rendered = await context.workers.run(answer.whole, images)
    return Response(rendered, media_type="application/json")


async def _stream(
    context: AppContext, request: Request, job: ImageJob, answer: _Answer
) -> AsyncGenerator[str, None]:
    async with aclosing(run_job(context, request, job)) as events:
        async for event in events:
            if isinstance(event, list):
                for index, image in enumerate(event):
                    yield data_event(await context.workers.run(answer.chunk, index, image))
            elif isinstance(event, OmniProgress):
                yield progress_comment(event)
    yield DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Renders what does not change between the choices and chunks of one answer."""

    id: str
    created_unix_s: int
    model: str
    body: ChatRequest
    seed: int | None

    def whole(self, images: list[Image]) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": self._content(image)},
                "finish_reason": "stop",
            }
            for index, image in enumerate(images)
        ]
        head = self._head("chat.completion")
        return json.dumps({**head, "choices": choices, "seed": self.seed}).encode()

    def chunk(self, index: int, image: Image) -> str:
        delta = {"role": "assistant", "content": self._content(image)}
        choice = {"index": index, "delta": delta, "finish_reason": "stop"}
        head = self._head("chat.completion.chunk")
        return json.dumps({**head, "modality": "image", "choices": [choice], "seed": self.seed})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
        }

    def _content(self, image: Image) -> list[dict[str, Any]]:
        image_format = self.body.output_format
        data = encode_image(image, image_format, compression=self.body.output_compression)
        return [{"type": "image_url", "image_url": {"url": to_data_url(data, image_format)}}]


async def _chat_job(context: AppContext, body: ChatRequest) -> ImageJob:
    context.lifecycle.check_serving()
    context.check_model(body.model)
    context.check_makes_images()
    _check_modalities(body)
    check_output(body.output_format, body.output_compression)
    prompt, urls = _last_user_turn(body.messages)
    size, n = _size(body), _count(body)
    check_limits(context.settings, prompt=prompt, n=n, knobs=body, size=size)
    return ImageJob(
        prompt=prompt,
        negative_prompt=body.negative_prompt,
        params=diffusion_params(body, n=n, size=size),
        inputs=await context.pictures.from_urls(urls),
    )


def _check_modalities(body: ChatRequest) -> None:
    wanted = body.modalities or ["image"]
    if "image" not in wanted or not set(wanted) <= {"image", "text"}:
        raise InvalidRequestError(
            f"modalities: {wanted} cannot be answered; this model makes images: ask for "
            '["image"] or ["text", "image"]',
            param="modalities",
        )


def _count(body: ChatRequest) -> int:
    if body.n is not None and body.num_outputs_per_prompt is not None:
        raise UnsupportedCombinationError(
            "n and num_outputs_per_prompt mean the same here; give one", param="n"
        )
    return body.n or body.num_outputs_per_prompt or 1


def _size(body: ChatRequest) -> ImageSize | None:
    sides = (body.width, body.height)
    if sides == (None, None):
        return parse_size(body.size)
    if body.size is not None:
        raise UnsupportedCombinationError(
            "give the size either as size or as width and height", param="size"
        )
    if body.width is None or body.height is None:
        missing = "width" if body.width is None else "height"
        raise InvalidRequestError(f"{missing} is missing; give both sides", param=missing)
    return body.width, body.height


def _last_user_turn(messages: list[Message]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and pairs of parameter name and URL of the pictures."""
    index = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if index is None:
        raise InvalidRequestError("messages: there is no user message", param="messages")
    content = messages[index].content
    where = f"messages[{index}].content"
    parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content or []
    text = "\n".join(part.text for part in parts if isinstance(part, TextPart)).strip()
    if not text:
        raise InvalidRequestError(f"{where}: the last user message has no text", param=where)
    urls = [
        (f"{where}[{position}].image_url.url", part.image_url.url)
        for position, part in enumerate(parts)
        if isinstance(part, ImagePart)
    ]
    return text, urls
