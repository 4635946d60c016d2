"""Answers of the operators' routes and of `/v1/models`."""

from __future__ import annotations

from typing import Any, Literal

from omnistage.api.protocol.base import ResponseModel


class Health(ResponseModel):
    """`status` is "ok" with status 200 and says what is the matter with 503."""

    status: Literal["ok", "starting", "draining", "unhealthy"]
    live: bool
    ready: bool
    reason: str | None
    stages: list[dict[str, Any]]


class Version(ResponseModel):
    version: str


class Root(ResponseModel):
    name: str
    version: str
    model: str
    documentation: str
    openapi: str


class Model(ResponseModel):
    """OpenAI's model object, and what the model makes."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    model_type: str
    output_modalities: list[str]


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[Model]
