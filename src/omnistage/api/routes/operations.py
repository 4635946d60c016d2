"""What operators and probes ask: health, readiness, metrics, version, models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage import __version__
from omnistage.api.context import Phase, context_of
from omnistage.api.protocol.operations import Health, Model, ModelList, Root, Version
from omnistage.contracts.errors import NotFoundError

router = APIRouter()


@router.get("/health", response_model=Health, summary="Can the engine do its work now?")
async def health(request: Request) -> Response:
    context = context_of(request)
    return _health(request, healthy=context.lifecycle.phase is not Phase.STARTING)


@router.get("/ready", response_model=Health, summary="Would a new request be taken?")
async def ready(request: Request) -> Response:
    context = context_of(request)
    return _health(request, healthy=context.lifecycle.phase is Phase.SERVING)


def _health(request: Request, *, healthy: bool) -> Response:
    context = context_of(request)
    state = context.engine.health()
    healthy = healthy and state.live and state.ready
    phase = context.lifecycle.phase
    if phase is Phase.SERVING:
        status = "ok" if healthy else "unhealthy"
    else:
        status = phase.value
    body = {
        "status": status,
        "live": state.live,
        "ready": state.ready and phase is Phase.SERVING,
        "reason": state.reason,
        "stages": state.stages,
    }
    return JSONResponse(body, status_code=200 if healthy else 503)


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    data, content_type = context_of(request).engine.metrics.render()
    return Response(data, media_type=content_type)


@router.get("/version", response_model=Version)
async def version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/", response_model=Root, summary="Where to go from here")
async def root(request: Request) -> Response:
    body = {
        "name": "omnistage",
        "version": __version__,
        "model": context_of(request).model_name,
        "documentation": "/docs",
        "openapi": "/openapi.json",
    }
    return JSONResponse(body)


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(request)]})


@router.get("/v1/models/{model_id:path}", response_model=Model)
async def retrieve_model(request: Request, model_id: str) -> Response:
    if model_id != context_of(request).model_name:
        raise NotFoundError(
            f"model {ascii(model_id)[:200]} is not served here; GET /v1/models lists what is",
            param="model",
        )
    return JSONResponse(_model(request))


def _model(request: Request) -> dict[str, Any]:
    config = context_of(request).engine.config
    modalities = {s.output_modality.value for s in config.pipeline.stages if s.final_output}
    return {
        "id": config.served_model_name,
        "object": "model",
        "created": request.app.state.created_unix_s,
        "owned_by": "omnistage",
        "root": config.model,
        "model_type": config.pipeline.model_type,
        "output_modalities": sorted(modalities),
    }
