"""`/v1/models`: what is served here."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage.api.context import context_of
from omnistage.api.protocol.operations import Model, ModelList
from omnistage.api.routes.head import answers_get

router = APIRouter()


@answers_get(router, "/v1/models", response_model=ModelList)
async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(request)]})


@answers_get(router, "/v1/models/{model_id:path}", response_model=Model)
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
