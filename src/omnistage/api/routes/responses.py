"""`POST /v1/responses`, without anything stored."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from omnistage.api.body import read_json
from omnistage.api.context import AppContext, context_of
from omnistage.api.disconnect import until_disconnect
from omnistage.api.errors import from_pydantic
from omnistage.api.event_stream import EventStream
from omnistage.api.openapi import json_body
from omnistage.api.protocol.responses import ResponsesRequest
from omnistage.api.protocol.text_answers import ResponsesResponse
from omnistage.api.routes.chat_text import STREAMED
from omnistage.api.text.chat_plan import ChatPlan, plan_chat
from omnistage.api.text.responses_answer import ResponseRun
from omnistage.api.text.responses_input import as_chat, name_inputs
from omnistage.contracts.errors import InvalidRequestError

router = APIRouter()


@router.post(
    "/v1/responses",
    response_model=ResponsesResponse,
    responses=STREAMED,
    summary="Answer with items: text, thoughts, calls",
    openapi_extra=json_body(ResponsesRequest),
)
async def respond(request: Request) -> Response:
    context = context_of(request)
    body = await read_json(request, ResponsesRequest)
    return await until_disconnect(request.receive, _respond(context, request, body))


async def _respond(context: AppContext, request: Request, body: ResponsesRequest) -> Response:
    context.lifecycle.check_serving()
    context.check_model(body.model)
    run = ResponseRun(context, request, body, await _plan(context, body))
    if body.stream:
        return EventStream(
            run.events(),
            slow_client_timeout_s=context.engine.config.limits.slow_client_timeout_s,
            error_name="error",
        )
    return Response(json.dumps(await run.whole()), media_type="application/json")


async def _plan(context: AppContext, body: ResponsesRequest) -> ChatPlan:
    try:
        chat, places = as_chat(body)
    except ValidationError as error:
        raise from_pydantic(error) from error
    try:
        return await plan_chat(context, chat)
    except InvalidRequestError as error:
        name_inputs(error, places)
        raise
