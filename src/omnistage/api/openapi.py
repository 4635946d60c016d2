"""The schema of bodies that routes read themselves, and the whole document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from omnistage.api.protocol.base import ErrorResponse

_REFERENCE = "#/components/schemas/{model}"

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request cannot be served as it is"},
    "5XX": {"model": ErrorResponse, "description": "The server cannot serve it, or not now"},
}

BEARER = Security(HTTPBearer(auto_error=False, description="One of the server's API keys."))
"""Documents the key; `AuthMiddleware` checks it."""


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that validates a JSON body by `model`."""
    return _body("application/json", {"$ref": _REFERENCE.format(model=model.__name__)})


def form_body(model: type[BaseModel], files: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """`openapi_extra` of a route with a multipart form: the fields of `model`, and files."""
    schema = model.model_json_schema(ref_template=_REFERENCE)
    schema["properties"] |= files
    schema["required"] = [*schema.get("required", []), *required]
    return _body("multipart/form-data", schema)


def _body(content_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {content_type: {"schema": schema}}}}


def install_openapi(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Serve a document that holds the schemas of `models` too."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, schemas = models_json_schema(
            [(model, "validation") for model in models], ref_template=_REFERENCE
        )
        document["components"]["schemas"] |= schemas.get("$defs", {})
        return document

    app.openapi = openapi  # type: ignore[method-assign]
