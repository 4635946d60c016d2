"""`POST /v1/audio/speech` and `GET /v1/audio/voices`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage.api.audio_encode import media_type
from omnistage.api.body import read_json
from omnistage.api.context import AppContext, context_of
from omnistage.api.disconnect import until_disconnect
from omnistage.api.event_stream import ByteStream, EventStream
from omnistage.api.openapi import json_body
from omnistage.api.protocol.speech import SpeechRequest, VoiceList
from omnistage.api.routes.head import answers_get
from omnistage.api.speech import SpeechFile, SpeechTask
from omnistage.api.tts.registry import adapter_for
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError

router = APIRouter()

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": 'The sound, in pieces as they are made; with `stream_format` "sse", events '
        "whose data is a `SpeechAudioDelta` or, last, a `SpeechAudioDone`; or `error` with an "
        "`ErrorResponse`.",
        "content": {
            "audio/mpeg": _BINARY,
            "audio/wav": _BINARY,
            "audio/flac": _BINARY,
            "audio/ogg": _BINARY,
            "audio/aac": _BINARY,
            "audio/pcm": _BINARY,
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}


@router.post(
    "/v1/audio/speech",
    response_class=Response,
    responses=_ANSWERS,
    summary="Speak a text",
    openapi_extra=json_body(SpeechRequest),
)
async def speak(request: Request) -> Response:
    context = context_of(request)
    body = await read_json(request, SpeechRequest)
    task = _task(context, request, body)
    slow_client_timeout_s = context.engine.config.limits.slow_client_timeout_s
    if body.stream_format == "sse":
        return EventStream(
            task.events(), slow_client_timeout_s=slow_client_timeout_s, error_name="error"
        )
    kind = media_type(body.response_format)
    if body.stream is False:
        whole = await until_disconnect(request.receive, task.whole())
        return Response(whole, media_type=kind)
    return ByteStream(task.pieces(), media_type=kind, slow_client_timeout_s=slow_client_timeout_s)


def _task(context: AppContext, request: Request, body: SpeechRequest) -> SpeechTask:
    """Check everything that can be known before the engine is asked."""
    context.lifecycle.check_serving()
    context.check_model(body.model)
    config = context.engine.config
    adapter = adapter_for(config)
    _check_text(context, body)
    if body.stream is False and body.stream_format == "sse":
        raise UnsupportedCombinationError(
            "stream: false is an answer in one piece; stream_format 'sse' needs stream: true",
            param="stream",
        )
    adapter.validate(config, body)
    return SpeechTask(
        context=context,
        request=request,
        job=adapter.build(config, body),
        file=SpeechFile(body.response_format, body.speed, whole=body.stream is False),
    )


def _check_text(context: AppContext, body: SpeechRequest) -> None:
    if not body.input.strip():
        raise InvalidRequestError("input: there is nothing to say", param="input")
    limit = context.settings.max_speech_chars
    if len(body.input) > limit:
        raise InvalidRequestError(
            f"input: {len(body.input)} characters are over this server's limit of {limit} "
            "(max_speech_chars)",
            param="input",
        )


@answers_get(router, "/v1/audio/voices", response_model=VoiceList)
async def list_voices(request: Request) -> Response:
    config = context_of(request).engine.config
    voices = adapter_for(config).voices(config)
    return JSONResponse({"voices": list(voices.names), "default": voices.default})
