"""Who may call `/v1/*`, and the routes beside it that work for a caller."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omnistage.api.errors import error_response
from omnistage.contracts.errors import AuthenticationError

PROTECTED_PREFIXES = ("/v1", "/tokenize", "/detokenize")
_POLICY_VIOLATION = 1008


class AuthMiddleware:
    """Wants `Authorization: Bearer <key>` with one of the keys, compared in constant time."""

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if _is_protected(scope) else None
        if error is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await error_response(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> AuthenticationError | None:
        authorization = Headers(scope=scope).get("authorization")
        if not self._keys:
            return None
        if authorization is None:
            return AuthenticationError(
                "no API key was given; send the header 'Authorization: Bearer <key>'"
            )
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            return AuthenticationError("the API key is wrong; send 'Authorization: Bearer <key>'")
        return None


def _is_protected(scope: Scope) -> bool:
    if scope["type"] == "lifespan":
        return False
    path: str = scope["path"]
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in PROTECTED_PREFIXES)
