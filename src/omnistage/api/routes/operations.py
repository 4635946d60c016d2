"""What operators and probes ask: health, readiness, metrics, version, models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage import __version__
from omnistage.api.context import Phase, context_of
from omnistage.api.protocol.operations import Health, Model, ModelList, Root, Version

if TYPE_CHECKING:
    from omnistage.engine.health import EngineHealth

router = APIRouter()

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def get(path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Answer GET, and HEAD, which the schema leaves out."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.add_api_route(path, endpoint, methods=["GET"], **options)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
        return endpoint

    return register


@get("/health", response_model=Health, summary="Can the engine do its work now?")
async def health(request: Request) -> Response:
    phase = context_of(request).lifecycle.phase
    state = context_of(request).engine.health()
    healthy = state.live and (state.ready or phase is Phase.DRAINING)
    return _render(phase, state, healthy=healthy and phase is not Phase.STARTING)


@get("/ready", response_model=Health, summary="Would a new request be taken?")
async def ready(request: Request) -> Response:
    phase = context_of(request).lifecycle.phase
    state = context_of(request).engine.health()
    return _render(phase, state, healthy=state.live and state.ready and phase is Phase.SERVING)


def _render(phase: Phase, state: EngineHealth, *, healthy: bool) -> Response:
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


@get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    data, content_type = context_of(request).engine.metrics.render()
    return Response(data, media_type=content_type)


@get("/version", response_model=Version)
async def version() -> Response:
    return JSONResponse({"version": __version__})


@get("/", response_model=Root, summary="Where to go from here")
async def root(request: Request) -> Response:
    body = {
        "name": "omnistage",
        "version": __version__,
        "model": context_of(request).model_name,
        "documentation": "/docs",
        "openapi": "/openapi.json",
    }
    return JSONResponse(body)


@get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(request)]})


@get("/v1/models/{model_id:path}", response_model=Model)
async def retrieve_model(request: Request, model_id: str) -> Response:
    context_of(request).check_model(model_id)
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
