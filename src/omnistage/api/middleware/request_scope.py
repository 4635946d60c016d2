"""The outermost layer: request id, access log, metrics, and the last net for exceptions."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.api.errors import error_response, report
from omnistage.contracts.errors import InvalidRequestError, RequestCancelledError
from omnistage.contracts.identity import new_request_id
from omnistage.observability.logging import get_logger, request_scope

if TYPE_CHECKING:
    from omnistage.observability.metrics import EngineMetrics

logger = get_logger(__name__)
access_log = get_logger("omnistage.access")

UNMATCHED = "unmatched"
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:=/+@-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_LOGGED_PATH_CHARS = 200
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestScopeMiddleware:
    """`state.request_id` is the client's X-Request-Id or a new one; `state.engine_request_id` is
    unique also when clients repeat theirs. A stream that fails behind its status line sets
    `state.outcome_status`."""

    def __init__(self, app: ASGIApp, *, metrics: EngineMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = _identify(scope)
        app = self._app if refusal is None else error_response(refusal)
        exchange = _Exchange(scope, send)
        started_s = time.monotonic()
        with request_scope(scope["state"]["request_id"]):
            try:
                await exchange.run(app, receive)
            finally:
                status = scope["state"].get("outcome_status", exchange.status)
                self._record(scope, status, time.monotonic() - started_s)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path_format", UNMATCHED)
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._metrics.http_request(route, method, status, seconds)
        client = (scope.get("client") or ("-",))[0]
        path = ascii(scope["path"][:_MAX_LOGGED_PATH_CHARS])[1:-1]
        access_log.info("%s %s %d %.3f s from %s", method, path, status, seconds, client)


class _Exchange:
    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send_on = send
        self._started = False
        self.status = RequestCancelledError.status

    async def run(self, app: ASGIApp, receive: Receive) -> None:
        try:
            await app(self._scope, receive, self._send)
        except Exception as error:
            known = report(error)
            if not self._started:
                await error_response(known)(self._scope, receive, self._send)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self._scope["state"]["request_id"]
        await self._send_on(message)


def _identify(scope: Scope) -> InvalidRequestError | None:
    """Set the ids in the scope's state. Returns what is wrong with the client's own id."""
    headers = Headers(scope=scope)
    given = headers.get("x-request-id")
    valid = given is not None and REQUEST_ID_PATTERN.fullmatch(given) is not None
    request_id = given if given is not None and valid else new_request_id()
    traceparent = headers.get("traceparent", "")
    state = scope.setdefault("state", {})
    state["request_id"] = request_id
    state["engine_request_id"] = new_request_id(request_id) if valid else request_id
    state["trace_context"] = traceparent if _TRACEPARENT.fullmatch(traceparent) else None
    if given is None or valid:
        return None
    return InvalidRequestError(
        "X-Request-Id must have 1 to 128 characters out of A-Z a-z 0-9 . _ : = / + @ -",
        param="X-Request-Id",
    )
