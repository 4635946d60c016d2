"""The answer of `/v1/images/*` as server-sent events: previews, then every finished picture."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request
from PIL.Image import Image

from omnistage.api.context import AppContext
from omnistage.api.event_stream import EventStream, data_event, progress_comment
from omnistage.api.generation import ImageJob, Preview, run_job
from omnistage.api.protocol.images import ImageFields
from omnistage.api.render import encode_image, to_base64
from omnistage.contracts.outputs import OmniProgress

Operation = Literal["image_generation", "image_edit"]

_ECHOED_QUALITY = {None: "auto", "standard": "medium", "hd": "high"}
"""To the values that OpenAI's events know; the two have the same meaning here."""

_NO_TOKENS = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
"""OpenAI's event type demands a usage; pictures cost no tokens here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEvents:
    """Renders the events of one request. Runs in a worker thread."""

    operation: Operation
    fields: ImageFields
    seed: int | None

    def preview(self, image: Image, image_index: int, preview_index: int) -> str:
        return self._event(
            "partial_image", image, image_index, {"partial_image_index": preview_index}
        )

    def completed(self, image: Image, image_index: int) -> str:
        return self._event(
            "completed", image, image_index, {"seed": self.seed, "usage": _NO_TOKENS}
        )

    def _event(self, kind: str, image: Image, image_index: int, more: dict[str, Any]) -> str:
        fields = self.fields
        data = encode_image(image, fields.output_format, compression=fields.output_compression)
        name = f"{self.operation}.{kind}"
        body = {
            "type": name,
            "b64_json": to_base64(data),
            "background": fields.background or "auto",
            "created_at": int(time.time()),
            "output_format": fields.output_format,
            "quality": _ECHOED_QUALITY.get(fields.quality, fields.quality),
            "size": f"{image.width}x{image.height}",
            "image_index": image_index,
            **more,
        }
        return data_event(json.dumps(body), name=name)


def image_stream(
    context: AppContext, request: Request, job: ImageJob, render: ImageEvents
) -> EventStream:
    return EventStream(
        _events(context, request, job, render),
        slow_client_timeout_s=context.engine.config.limits.slow_client_timeout_s,
        error_name="error",
    )


async def _events(
    context: AppContext, request: Request, job: ImageJob, render: ImageEvents
) -> AsyncGenerator[str, None]:
    workers = context.workers
    async with aclosing(run_job(context, request, job)) as events:
        async for event in events:
            if isinstance(event, OmniProgress):
                yield progress_comment(event)
            elif isinstance(event, Preview):
                for index, image in enumerate(event.images):
                    yield await workers.run(render.preview, image, index, event.index)
            else:
                for index, image in enumerate(event):
                    yield await workers.run(render.completed, image, index)
