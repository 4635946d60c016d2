"""What operators and probes ask: health, readiness, metrics, version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage import __version__
from omnistage.api.context import context_of
from omnistage.api.lifecycle import Phase
from omnistage.api.protocol.operations import Health, Root, Version
from omnistage.api.routes.head import answers_get

if TYPE_CHECKING:
    from omnistage.engine.health import EngineHealth

router = APIRouter()

_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "It cannot, and `reason` says why"}
}


@answers_get(
    router,
    "/health",
    response_model=Health,
    responses=_UNHEALTHY,
    summary="Can the engine do its work now?",
)
async def health(request: Request) -> Response:
    phase = context_of(request).lifecycle.phase
    state = context_of(request).engine.health()
    healthy = state.live and (state.ready or phase is Phase.DRAINING)
    return _render(phase, state, healthy=healthy and phase is not Phase.STARTING)


@answers_get(
    router,
    "/ready",
    response_model=Health,
    responses=_UNHEALTHY,
    summary="Would a new request be taken?",
)
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


@answers_get(router, "/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    data, content_type = context_of(request).engine.metrics.render()
    return Response(data, media_type=content_type)


@answers_get(router, "/version", response_model=Version)
async def version() -> Response:
    return JSONResponse({"version": __version__})


@answers_get(router, "/", response_model=Root, summary="Where to go from here")
async def root(request: Request) -> Response:
    body = {
        "name": "omnistage",
        "version": __version__,
        "model": context_of(request).model_name,
        "documentation": "/docs",
        "openapi": "/openapi.json",
    }
    return JSONResponse(body)
