"""The application behind a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from omnistage.api.app import create_app
from omnistage.api.http_side import HttpServer
from omnistage.api.listener import open_listener, url_of
from omnistage.api.settings import ApiSettings
from tests.api.fake_engine import FakeEngine

GUARD_S = 30.0


@asynccontextmanager
async def live_server(
    engine: FakeEngine, settings: ApiSettings | None = None
) -> AsyncIterator[str]:
    """Yields the URL. Everything is closed afterwards, within a deadline."""
    listener = open_listener("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(engine, settings or ApiSettings()),
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        async with asyncio.timeout(GUARD_S):
            await serving
        listener.close()


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def raw_post(path: str, body: bytes, *headers: str) -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        "Content-Type: application/json",
        *(headers or [f"Content-Length: {len(body)}"]),
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
