"""`POST /v1/completions`."""

from __future__ import annotations

import json
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from omnistage.api.body import read_json
from omnistage.api.context import AppContext, context_of
from omnistage.api.disconnect import until_disconnect
from omnistage.api.event_stream import EventStream
from omnistage.api.openapi import json_body
from omnistage.api.protocol.completions import CompletionRequest
from omnistage.api.protocol.text_answers import CompletionResponse
from omnistage.api.routes.chat_text import STREAMED
from omnistage.api.text.completion import completion_chunks, plan_completion, whole_completion

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses=STREAMED,
    summary="Go on with a text",
    openapi_extra=json_body(CompletionRequest),
)
async def complete(request: Request) -> Response:
    context = context_of(request)
    body = await read_json(request, CompletionRequest)
    return await until_disconnect(request.receive, _complete(context, request, body))


async def _complete(context: AppContext, request: Request, body: CompletionRequest) -> Response:
    plan = plan_completion(context, body)
    head = {
        "id": f"cmpl-{request.state.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": context.model_name,
        "system_fingerprint": None,
    }
    if body.stream:
        return EventStream(
            completion_chunks(context, request, plan, head),
            slow_client_timeout_s=context.engine.config.limits.slow_client_timeout_s,
        )
    answer = await whole_completion(context, request, plan, head)
    return Response(json.dumps(answer), media_type="application/json")
