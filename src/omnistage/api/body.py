"""Reading request bodies: bytes to validated models, off the event loop when large."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError

from omnistage.api.context import context_of
from omnistage.api.errors import from_pydantic
from omnistage.api.protocol.base import ApiModel
from omnistage.contracts.errors import InvalidRequestError

Model = TypeVar("Model", bound=ApiModel)

_LARGE_BODY_BYTES = 256 * 1024


async def read_json(request: Request, model: type[Model]) -> Model:
    """Validate a JSON body. pydantic's own parser bounds nesting and refuses broken UTF-8 and lone
    surrogates; every fault is an `InvalidRequestError` with the field's path."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequestError(
            f"the body must be JSON with content-type application/json, not "
            f"{ascii(content_type or 'nothing')[:80]}",
            param="content-type",
        )
    body = await request.body()
    if len(body) > _LARGE_BODY_BYTES:
        return await context_of(request).workers.run_bounded(_validate, body, model)
    return _validate(body, model)


def _validate(body: bytes, model: type[Model]) -> Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_pydantic(error) from error
