"""`POST /v1/chat/completions` of a model that answers with text."""

from __future__ import annotations

import json
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from omnistage.api.body import read_json
from omnistage.api.context import AppContext, context_of
from omnistage.api.disconnect import until_disconnect
from omnistage.api.event_stream import EventStream
from omnistage.api.openapi import json_body
from omnistage.api.protocol.chat_text import TextChatRequest
from omnistage.api.protocol.text_answers import TextChatResponse
from omnistage.api.text.chat_answer import Head, chunks, whole_answer
from omnistage.api.text.chat_plan import plan_chat

router = APIRouter()

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


@router.post(
    "/v1/chat/completions",
    response_model=TextChatResponse,
    responses=STREAMED,
    summary="Answer a conversation",
    openapi_extra=json_body(TextChatRequest),
)
async def complete_chat(request: Request) -> Response:
    context = context_of(request)
    body = await read_json(request, TextChatRequest)
    return await until_disconnect(request.receive, _complete(context, request, body))


async def _complete(context: AppContext, request: Request, body: TextChatRequest) -> Response:
    plan = await plan_chat(context, body)
    head = Head(
        id=f"chatcmpl-{request.state.request_id}",
        created_unix_s=int(time.time()),
        model=context.model_name,
    )
    if body.stream:
        return EventStream(
            chunks(context, request, plan, head),
            slow_client_timeout_s=context.engine.config.limits.slow_client_timeout_s,
        )
    answer = await whole_answer(context, request, plan, head)
    return Response(json.dumps(answer), media_type="application/json")
