"""Serving: take the port, answer probes while the model loads, then requests, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from omnistage.api.app import create_app
from omnistage.api.context import Lifecycle, Phase
from omnistage.api.listener import open_listener, url_of
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import InternalError
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    from omnistage.engine.async_omni import AsyncOmni

logger = get_logger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HTTP_SHUTDOWN_S = 5
_HURRIED_HTTP_SHUTDOWN_S = 1
_SHUTDOWN_MARGIN_S = 5.0


class StopSignals:
    """The first SIGINT or SIGTERM sets `first`, the next one `second`."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.last_number = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self.last_number = number
        (self.second if self.first.is_set() else self.first).set()


class HttpServer(uvicorn.Server):
    """uvicorn, but the signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def print_line(line: str) -> None:
    print(line, flush=True)


def run_server(
    engine_factory: Callable[[], AsyncOmni],
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    settings: ApiSettings | None = None,
    announce: Callable[[str], None] = print_line,
) -> int:
    """Serve until SIGINT or SIGTERM: drain, then shut down; a second signal skips the draining.

    `engine_factory` is called once the port is taken. Returns the exit code: 0, or 128 plus the
    signal's number when a second one cut the work short. Raises the `OmniError` that kept the
    engine from starting, with everything shut down, and `ConfigurationError` for a taken port.
    """
    listener = open_listener(host, port)
    try:
        serving = _serve(engine_factory, listener, settings or ApiSettings(), announce)
        return asyncio.run(serving)
    finally:
        listener.close()


async def _serve(
    engine_factory: Callable[[], AsyncOmni],
    listener: socket.socket,
    settings: ApiSettings,
    announce: Callable[[str], None],
) -> int:
    signals = StopSignals()
    with signals.installed():
        engine = engine_factory()
        lifecycle = Lifecycle(phase=Phase.STARTING)
        app = create_app(engine, settings, lifecycle=lifecycle)
        server = _http_server(app)
        http = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            if await _started(engine, http, signals.first):
                lifecycle.phase = Phase.SERVING
                announce(f"ready: {engine.config.served_model_name} at {url_of(listener)}")
                await _first_of(signals.first.wait(), http)
                lifecycle.phase = Phase.DRAINING
                await _drain(engine, signals.second, settings.drain_timeout_s)
        finally:
            lifecycle.phase = Phase.DRAINING
            try:
                await _shut_down(engine)
            finally:
                await _stop_http(server, http, signals.second)
                app.state.context.workers.close()
    if not signals.first.is_set():
        raise InternalError("the HTTP server ended by itself; the log says why")
    return 128 + signals.last_number if signals.second.is_set() else 0


def _http_server(app: FastAPI) -> HttpServer:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_HTTP_SHUTDOWN_S,
    )
    return HttpServer(config)


async def _started(engine: AsyncOmni, http: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Whether the engine came up before somebody asked for the end. Raises what kept it."""
    start = asyncio.create_task(engine.start())
    try:
        await _first_of(stop.wait(), start, http)
        if start.done():
            start.result()
        return start.done() and not stop.is_set()
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)


async def _drain(engine: AsyncOmni, second: asyncio.Event, timeout_s: float) -> None:
    logger.info("draining for up to %g s; a second signal ends it at once", timeout_s)
    drain = asyncio.create_task(engine.drain(timeout_s))
    try:
        await _first_of(second.wait(), drain)
        if drain.done() and drain.result() is False:
            logger.warning("some requests still ran after %g s and end now", timeout_s)
    finally:
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)


async def _shut_down(engine: AsyncOmni) -> None:
    """Before the HTTP side: open requests end with an error that the server still delivers."""
    try:
        async with asyncio.timeout(engine.config.limits.shutdown_timeout_s + _SHUTDOWN_MARGIN_S):
            await engine.shutdown()
    except TimeoutError:
        logger.error("the engine did not shut down in time")


async def _stop_http(server: HttpServer, http: asyncio.Task[None], second: asyncio.Event) -> None:
    """Let open answers out, for less time when somebody is in a hurry."""
    server.should_exit = True
    if second.is_set():
        await asyncio.wait({http}, timeout=_HURRIED_HTTP_SHUTDOWN_S)
    else:
        await _first_of(second.wait(), http, timeout_s=_HTTP_SHUTDOWN_S + _SHUTDOWN_MARGIN_S)
    server.force_exit = True
    try:
        async with asyncio.timeout(_SHUTDOWN_MARGIN_S):
            await http
    except TimeoutError:
        logger.error("the HTTP server did not stop in time")


async def _first_of(
    event_wait: Coroutine[Any, Any, Any], *tasks: asyncio.Task[Any], timeout_s: float | None = None
) -> None:
    """Wait for the event or for any of `tasks`, which stay as they are."""
    waiter = asyncio.create_task(event_wait)
    try:
        await asyncio.wait({waiter, *tasks}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
