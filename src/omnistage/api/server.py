"""Serving: take the port, answer probes while the model loads, then requests, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from omnistage.api.lifecycle import Lifecycle, Phase
from omnistage.api.listener import hang_up_on_dead_readers, open_listener, url_of
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import InternalError
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    from omnistage.api.http_side import HttpSide
    from omnistage.engine.async_omni import AsyncOmni

logger = get_logger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
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
        hang_up_on_dead_readers(listener, engine.config.limits.slow_client_timeout_s)
        lifecycle = Lifecycle(phase=Phase.STARTING)
        start = asyncio.create_task(engine.start())
        http = None
        try:
            http = await _open_http(engine, settings, lifecycle, listener)
            if await _started(start, http.task, signals.first):
                lifecycle.phase = Phase.SERVING
                announce(f"ready: {engine.config.served_model_name} at {url_of(listener)}")
                await _first_of(signals.first.wait(), http.task)
                lifecycle.phase = Phase.DRAINING
                await _drain(engine, signals.second, settings.drain_timeout_s)
        finally:
            lifecycle.phase = Phase.DRAINING
            try:
                await _shut_down(engine, start)
            finally:
                if http is not None:
                    await http.stop(signals.second)
    if not signals.first.is_set():
        raise InternalError("the HTTP server ended by itself; the log says why")
    return 128 + signals.last_number if signals.second.is_set() else 0


async def _open_http(
    engine: AsyncOmni, settings: ApiSettings, lifecycle: Lifecycle, listener: socket.socket
) -> HttpSide:
    """Importing the HTTP side takes half a second. The stages' processes are started first, so
    that both load at the same time."""
    await asyncio.sleep(0)
    from omnistage.api.http_side import HttpSide

    return HttpSide(engine, settings, lifecycle, listener)


async def _started(
    start: asyncio.Task[None], http: asyncio.Task[None], stop: asyncio.Event
) -> bool:
    """Whether the engine came up before somebody asked for the end. Raises what kept it."""
    await _first_of(stop.wait(), start, http)
    if start.done():
        start.result()
    return start.done() and not stop.is_set()


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


async def _shut_down(engine: AsyncOmni, start: asyncio.Task[None]) -> None:
    """Before the HTTP side: open requests end with an error that the server still delivers."""
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    try:
        async with asyncio.timeout(engine.config.limits.shutdown_timeout_s + _SHUTDOWN_MARGIN_S):
            await engine.shutdown()
    except TimeoutError:
        logger.error("the engine did not shut down in time")


async def _first_of(event_wait: Coroutine[Any, Any, Any], *tasks: asyncio.Task[Any]) -> None:
    """Wait for the event or for any of `tasks`, which stay as they are."""
    waiter = asyncio.create_task(event_wait)
    try:
        await asyncio.wait({waiter, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
