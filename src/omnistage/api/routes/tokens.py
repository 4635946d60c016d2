"""`POST /tokenize` and `/detokenize`: the model's own tokenizer, asked in its stage."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage.api.body import read_json
from omnistage.api.context import AppContext, context_of
from omnistage.api.openapi import json_body
from omnistage.api.protocol.text_answers import DetokenizeResponse, TokenizeResponse
from omnistage.api.protocol.tokens import DetokenizeRequest, TokenizeRequest
from omnistage.api.text.conversation import read_messages
from omnistage.api.text.params import text_stage
from omnistage.contracts.errors import InvalidRequestError

router = APIRouter()

_OPTIONS = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
_TIMEOUT_S = 30.0


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    summary="The token ids of a text or a conversation",
    openapi_extra=json_body(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_json(request, TokenizeRequest)
    arguments = {name: getattr(body, name) for name in _OPTIONS if getattr(body, name) is not None}
    if body.prompt is not None:
        arguments["prompt"] = body.prompt
    if body.messages is not None:
        conversation = read_messages(body.messages)
        for param in conversation.kinds.values():
            raise InvalidRequestError(f"{param}: only text is tokenized here", param=param)
        arguments["messages"] = conversation.messages
    if body.tools:
        arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    answer = await _call(context, body.model, "tokenize", arguments)
    return JSONResponse(
        {
            "count": len(answer["tokens"]),
            "max_model_len": answer.get("max_model_len"),
            "tokens": answer["tokens"],
            "token_strs": answer["token_strs"] if body.return_token_strs else None,
        }
    )


@router.post(
    "/detokenize",
    response_model=DetokenizeResponse,
    summary="The text of token ids",
    openapi_extra=json_body(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_json(request, DetokenizeRequest)
    answer = await _call(context, body.model, "detokenize", {"tokens": body.tokens})
    return JSONResponse({"prompt": answer["prompt"]})


async def _call(
    context: AppContext, model: str | None, method: str, arguments: dict[str, Any]
) -> Any:
    context.lifecycle.check_serving()
    context.check_model(model)
    stage_id = text_stage(context.engine.config)
    return await context.engine.call_stage(stage_id, method, arguments, timeout_s=_TIMEOUT_S)
