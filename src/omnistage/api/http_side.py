"""The HTTP side of a running server: the application and the uvicorn server that carries it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import uvicorn

from omnistage.api.app import create_app
from omnistage.api.lifecycle import Lifecycle
from omnistage.api.settings import ApiSettings
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    from omnistage.engine.async_omni import AsyncOmni

logger = get_logger(__name__)

_SHUTDOWN_S = 5
_HURRIED_SHUTDOWN_S = 1
_MARGIN_S = 5.0
_LINGER_S = 5.0
"""How long a client may take nothing of the end of its answer."""


class HttpServer(uvicorn.Server):
    """uvicorn, but the signals are ours, and a connection that is closed on a client which takes
    nothing of what is left for it is not kept."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving: dict[Any, tuple[int, float]] = {}
        """Closed connections: bytes still to be taken, and since when it is that many."""

    async def on_tick(self, counter: int) -> bool:
        self._cut_off()
        return await super().on_tick(counter)

    def _cut_off(self) -> None:
        now_s, leaving = time.monotonic(), {}
        for one in self.server_state.connections:
            transport = one.transport
            if transport is None or not transport.is_closing():
                continue
            left_bytes = transport.get_write_buffer_size()
            known_bytes, since_s = self._leaving.get(one, (left_bytes, now_s))
            leaving[one] = (left_bytes, since_s if left_bytes == known_bytes else now_s)
            if now_s - leaving[one][1] > _LINGER_S:
                transport.abort()
        self._leaving = leaving

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpSide:
    """Serves from its creation on, in `task`, until `stop`."""

    def __init__(
        self,
        engine: AsyncOmni,
        settings: ApiSettings,
        lifecycle: Lifecycle,
        listener: socket.socket,
    ) -> None:
        # It warns, past our log's format, of every malformed form, which is answered with 400.
        logging.getLogger("python_multipart").setLevel(logging.ERROR)
        app = create_app(engine, settings, lifecycle=lifecycle)
        self._workers = app.state.context.workers
        self._server = HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=_SHUTDOWN_S,
            )
        )
        self.task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self, hurry: asyncio.Event) -> None:
        """Let open answers out, for less time when somebody is in a hurry."""
        self._server.should_exit = True
        try:
            await self._answers_out(hurry)
            self._server.force_exit = True
            async with asyncio.timeout(_MARGIN_S):
                await self.task
        except TimeoutError:
            logger.error("the HTTP server did not stop in time")
        finally:
            self._workers.close()

    async def _answers_out(self, hurry: asyncio.Event) -> None:
        if hurry.is_set():
            await asyncio.wait({self.task}, timeout=_HURRIED_SHUTDOWN_S)
            return
        waiter = asyncio.create_task(hurry.wait())
        try:
            await asyncio.wait(
                {waiter, self.task},
                timeout=_SHUTDOWN_S + _MARGIN_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            waiter.cancel()
