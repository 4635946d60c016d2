"""The one place where an error becomes an HTTP answer or a stream event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from omnistage.contracts.errors import (
    AuthenticationError,
    ConfigurationError,
    InvalidRequestError,
    NotFoundError,
    OmniError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    StageLostError,
    UnavailableError,
    as_omni_error,
)
from omnistage.observability.logging import get_logger

logger = get_logger(__name__)

_RETRYABLE = (OverloadedError, UnavailableError, StageLostError)
_FOR_THE_LOG = (ProtocolError, ConfigurationError)
"""Their messages name processes and paths of this host."""
_MAX_REPORTED_ERRORS = 3
_MAX_VALUE_CHARS = 60
_FAULT_OF_OURS = "internal error; the server's log has the details under this request id"


class MethodNotAllowedError(InvalidRequestError):
    status, type = 405, "method_not_allowed"


def error_body(error: OmniError) -> dict[str, Any]:
    """OpenAI's error object. `code` repeats the HTTP status, which a stream event has no other
    place for."""
    return {
        "error": {
            "message": _FAULT_OF_OURS if isinstance(error, _FOR_THE_LOG) else error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
        }
    }


def error_headers(error: OmniError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None or isinstance(error, _RETRYABLE):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: OmniError) -> JSONResponse:
    return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))


def report(error: BaseException) -> OmniError:
    """Classify any failure and log what the client must not see, once."""
    known = as_omni_error(error)
    if known is not error:
        logger.error("unexpected %s", type(error).__name__, exc_info=error)
    elif known.status >= 500 and (known.detail or not isinstance(known, UnavailableError)):
        logger.error("%s: %s\n%s", known.type, known.message, known.detail or "")
    return known


def describe_validation(errors: Sequence[Any]) -> InvalidRequestError:
    """One message from pydantic's errors; `param` is the path of the first one."""
    described = [_describe(error) for error in errors[:_MAX_REPORTED_ERRORS]]
    message = "; ".join(text for _, text in described)
    if len(errors) > _MAX_REPORTED_ERRORS:
        message += f"; and {len(errors) - _MAX_REPORTED_ERRORS} more"
    return InvalidRequestError(message, param=described[0][0] or None)


def from_pydantic(error: ValidationError) -> InvalidRequestError:
    return describe_validation(error.errors(include_url=False))


def _describe(error: Any) -> tuple[str, str]:
    context = error.get("ctx") or {}
    path = field_path((*error["loc"], *([context["field"]] if "field" in context else [])))
    text = error["msg"]
    value = error.get("input")
    if isinstance(value, str | int | float | bool) and "field" not in context:
        text = f"{text} (got {_short(value)})"
    return path, f"{path}: {text}" if path else text


def field_path(location: Sequence[str | int]) -> str:
    """`("messages", 0, "content", "<parts>", 1)` → `messages[0].content[1]`: tags of unions, in
    angle brackets, are no part of what the client wrote."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<") and part != "[key]":
            path += f".{part}" if path else part
    return path


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def _from_http_exception(request: Request, error: HTTPException) -> OmniError:
    route = f"{request.method} {request.url.path}"[:200]
    if error.status_code == 404:
        return NotFoundError(
            f"there is no {ascii(route)[1:-1]}; GET /openapi.json lists the routes"
        )
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowedError(f"{request.method} is not allowed here; allowed: {allowed}")
    return InvalidRequestError(str(error.detail))


def install_error_handlers(app: FastAPI) -> None:
    """Every exception that can leave a route renders in the same form."""

    async def on_omni_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(report(error))

    async def on_validation_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(describe_validation(error.errors()))

    async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        response = error_response(_from_http_exception(request, error))
        response.headers.update(error.headers or {})
        return response

    async def on_disconnect(_: Request, __: Exception) -> JSONResponse:
        return error_response(RequestCancelledError("the client closed the connection"))

    app.add_exception_handler(OmniError, on_omni_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
