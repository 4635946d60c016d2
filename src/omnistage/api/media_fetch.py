"""Fetching pictures, sounds and videos from URLs that strangers wrote.

Every connection, also after a redirect, goes to an address that was checked and to no other: the
name is resolved once, all its addresses must pass, and the socket is opened to the number, while
TLS and the Host header keep the name.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from omnistage import __version__
from omnistage.api.addresses import is_public
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import InvalidRequestError, PayloadTooLargeError

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port → numeric addresses."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
_HTTP_HINT = " (the operator can start the server with --allow-http-media)"
_MAX_ADDRESSES_TRIED = 4


class RefusedAddressError(InvalidRequestError):
    """The URL leads to an address that this server does not visit for a client."""


async def resolve_host(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections only to addresses that passed the check it made itself."""

    def __init__(
        self, *, allow_private: bool, resolve: Resolve, inner: httpcore.AsyncNetworkBackend
    ) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._inner = inner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (the base class names it so)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._checked_addresses(host, port)
        for position, address in enumerate(addresses, start=1):
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if position == len(addresses):
                    raise
        raise httpcore.ConnectError(f"{host} has no address")

    async def _checked_addresses(self, host: str, port: int) -> list[str]:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} does not resolve") from error
        if not self._allow_private and not all(is_public(address) for address in addresses):
            raise RefusedAddressError(
                f"the host {host!a} has a private or reserved address; only public ones are "
                "fetched (the operator can start the server with --allow-private-media)"
            )
        return addresses[:_MAX_ADDRESSES_TRIED]

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.UnsupportedProtocol("sockets of this machine are not fetched from")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class MediaFetcher:
    """GET with bounds: scheme, address, redirects, bytes; time is bounded by the caller.

    No proxy, cookie or credential of this machine takes part.
    """

    def __init__(
        self,
        settings: ApiSettings,
        *,
        resolve: Resolve = resolve_host,
        inner: httpcore.AsyncNetworkBackend | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._backend = PinnedBackend(
            allow_private=settings.allow_private_media,
            resolve=resolve,
            inner=inner or httpcore.AnyIOBackend(),
        )
        self._ssl_context = ssl_context

    async def fetch(self, url: str, *, max_bytes: int) -> bytes:
        """The body of the final answer. Raises `InvalidRequestError` or `PayloadTooLargeError`."""
        async with httpcore.AsyncConnectionPool(
            ssl_context=self._ssl_context,
            max_connections=1,
            http2=False,
            network_backend=self._backend,
        ) as pool:
            for _ in range(self._settings.max_redirects + 1):
                answer = await self._one_hop(pool, url, max_bytes)
                if isinstance(answer, bytes):
                    return answer
                url = answer
        raise InvalidRequestError(
            f"the URL redirects more than {self._settings.max_redirects} times"
        )

    async def _one_hop(
        self, pool: httpcore.AsyncConnectionPool, url: str, max_bytes: int
    ) -> bytes | str:
        parts = self._checked_url(url)
        target = _to_httpcore(parts)
        timeouts = {"connect": self._settings.media_timeout_s / _MAX_ADDRESSES_TRIED}
        try:
            async with pool.stream(
                "GET", target, headers=_headers(target), extensions={"timeout": timeouts}
            ) as response:
                return await _read_answer(response, url, max_bytes)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise InvalidRequestError(
                f"the file at {parts.netloc!a} could not be fetched: {type(error).__name__}"
            ) from error

    def _checked_url(self, url: str) -> SplitResult:
        if len(url) > _MAX_URL_CHARS:
            raise InvalidRequestError(f"a URL has {len(url)} characters; at most {_MAX_URL_CHARS}")
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise InvalidRequestError("the URL is malformed") from error
        allowed = ("https", "http") if self._settings.allow_http_media else ("https",)
        if parts.scheme not in allowed:
            raise InvalidRequestError(
                f"the URL has the scheme {parts.scheme!a}; fetched are: "
                f"{', '.join(allowed)}{_HTTP_HINT if parts.scheme == 'http' else ''}"
            )
        if parts.username is not None or parts.password is not None:
            raise InvalidRequestError("the URL holds credentials; leave them out")
        if not parts.hostname:
            raise InvalidRequestError("the URL names no host")
        return parts


def _to_httpcore(parts: SplitResult) -> httpcore.URL:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        host = (parts.hostname or "").encode("ascii" if parts.netloc.isascii() else "idna")
        return httpcore.URL(
            scheme=parts.scheme.encode(),
            host=host,
            port=parts.port or _DEFAULT_PORTS[parts.scheme],
            target=target.encode("ascii"),
        )
    except UnicodeError as error:
        raise InvalidRequestError(
            "the URL holds characters that must be percent-encoded"
        ) from error


def _headers(target: httpcore.URL) -> list[tuple[bytes, bytes]]:
    host = b"[%b]" % target.host if b":" in target.host else target.host
    if target.port not in (None, _DEFAULT_PORTS[target.scheme.decode()]):
        host += f":{target.port}".encode()
    return [
        (b"Host", host),
        (b"User-Agent", f"omnistage/{__version__}".encode()),
        (b"Accept", b"image/*, audio/*, video/*"),
        (b"Accept-Encoding", b"identity"),
    ]


async def _read_answer(response: httpcore.Response, url: str, max_bytes: int) -> bytes | str:
    headers = {name.lower(): value for name, value in response.headers}
    if response.status in _REDIRECTS and b"location" in headers:
        return urljoin(url, headers[b"location"].decode("latin-1"))
    if response.status != 200:
        raise InvalidRequestError(f"the URL's server answered with status {response.status}")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise InvalidRequestError("the URL's server sent a compressed answer unasked")
    data = bytearray()
    async for chunk in response.aiter_stream():
        data += chunk
        if len(data) > max_bytes:
            raise PayloadTooLargeError(f"the file at the URL has more than {max_bytes} bytes")
    return bytes(data)
