"""The HTTP side of a running server: the application and the uvicorn server that carries it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from typing import TYPE_CHECKING

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


class HttpServer(uvicorn.Server):
    """uvicorn, but the signals are ours."""

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
