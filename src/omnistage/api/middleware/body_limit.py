"""Bounds on what clients may send: bytes of a body, its time to arrive, open requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.api.errors import error_response
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import InvalidRequestError, OmniError, OverloadedError
from omnistage.contracts.errors import PayloadTooLargeError as TooLarge

_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_DISCARD_S = 2.0
_DISCARD_BYTES = 64 * 1024 * 1024


class BodyLimitMiddleware:
    """A refused body is answered by this layer; whatever the application says about it is
    dropped."""

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings
        self._open = _OpenBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _METHODS_WITH_BODY:
            await self._app(scope, receive, send)
            return
        body = _BoundedBody(receive, send, self._settings, self._open)
        body.refusal = self._refuse_at_once(Headers(scope=scope))
        if body.refusal is None:
            await body.run(self._app, scope)
        if body.refusal is not None and not body.started:
            if "expect" not in Headers(scope=scope):
                await body.discard()
            response = error_response(body.refusal)
            response.headers["Connection"] = "close"
            await response(scope, receive, send)

    def _refuse_at_once(self, headers: Headers) -> OmniError | None:
        if self._open.requests >= self._settings.max_open_requests:
            return OverloadedError(
                f"{self._open.requests} requests are open, the most this server takes",
                retry_after_s=1.0,
            )
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdecimal():
            return _too_large(int(declared), self._settings.max_body_bytes)
        return None


def _too_large(size_bytes: int, limit_bytes: int) -> TooLarge | None:
    if size_bytes <= limit_bytes:
        return None
    return TooLarge(f"the body has {size_bytes} bytes or more; at most {limit_bytes} are taken")


@dataclass(slots=True)
class _OpenBodies:
    requests: int = 0
    size_bytes: int = 0


class _BoundedBody:
    def __init__(
        self, receive: Receive, send: Send, settings: ApiSettings, open_bodies: _OpenBodies
    ) -> None:
        self._receive_on = receive
        self._send_on = send
        self._settings = settings
        self._open = open_bodies
        self._deadline = asyncio.get_running_loop().time() + settings.body_timeout_s
        self._size_bytes = 0
        self._complete = False
        self.refusal: OmniError | None = None
        self.started = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        self._open.requests += 1
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            if self.refusal is None:
                raise
        finally:
            self._open.requests -= 1
            self._open.size_bytes -= self._size_bytes

    async def _receive(self) -> Message:
        if self._complete:
            return await self._receive_on()
        if self.refusal is not None:
            raise self.refusal
        message = await self._next_message()
        self._complete = not message.get("more_body", False)
        self._count(len(message.get("body", b"")))
        if self.refusal is not None:
            raise self.refusal
        return message

    def _count(self, chunk_bytes: int) -> None:
        self._size_bytes += chunk_bytes
        self._open.size_bytes += chunk_bytes
        self.refusal = _too_large(self._size_bytes, self._settings.max_body_bytes)
        if self.refusal is None and self._open.size_bytes > self._settings.max_open_body_bytes:
            self.refusal = OverloadedError(
                "the bodies of all open requests take too much memory; try again",
                retry_after_s=1.0,
            )

    async def _next_message(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive_on()
        except TimeoutError:
            self.refusal = InvalidRequestError(
                f"the body did not arrive within {self._settings.body_timeout_s:g} s"
            )
            raise self.refusal from None

    async def _send(self, message: Message) -> None:
        if self.refusal is not None and not self.started:
            return
        self.started = True
        await self._send_on(message)

    async def discard(self) -> None:
        """Read on for a moment, so that a client which sends first and reads afterwards sees the
        answer instead of a reset connection."""
        discarded_bytes, more = 0, not self._complete
        try:
            async with asyncio.timeout(_DISCARD_S):
                while more and discarded_bytes < _DISCARD_BYTES:
                    message = await self._receive_on()
                    discarded_bytes += len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            return
