"""Answers that leave as they are made, with one terminal outcome, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from omnistage.api.disconnect import until_disconnect
from omnistage.api.errors import error_body, report
from omnistage.contracts.errors import OmniError, RequestCancelledError, SlowClientError
from omnistage.contracts.outputs import OmniProgress

DONE = "data: [DONE]\n\n"


def data_event(text: str, *, name: str | None = None) -> str:
    """One event; `text` and `name` hold no line break."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n"


def progress_comment(progress: OmniProgress) -> str:
    """A line that clients skip. It keeps proxies and dead-peer detection awake."""
    return f": stage {progress.stage_id} step {progress.step}/{progress.total_steps}\n\n"


class ByteStream(Response):
    """Sends `pieces` as they come.

    A failure before the first one is raised and so gets its own HTTP status. A later one cuts the
    connection before the answer's end, so that nobody takes a part for the whole. A hang-up, or a
    client that reads nothing for `slow_client_timeout_s`, closes the generator.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None] | AsyncGenerator[str, None],
        *,
        slow_client_timeout_s: float,
        media_type: str | None = None,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type=media_type
        )
        del self.headers["content-length"]
        self._pieces = pieces
        self._slow_client_timeout_s = slow_client_timeout_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(send))
        except Exception as error:
            if not self._started:
                raise
            known = report(error)
            scope["state"]["outcome_status"] = known.status
            await self._end_with(known, send)

    async def _run(self, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                if not self._started:
                    await self._start(send)
                await self._send(send, piece, more=True)
        await self._send(send, b"", more=False)

    async def _start(self, send: Send) -> None:
        start: Message = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        self._started = True

    async def _send(self, send: Send, piece: bytes | str, *, more: bool) -> None:
        message: Message = {
            "type": "http.response.body",
            "body": piece.encode() if isinstance(piece, str) else piece,
            "more_body": more,
        }
        try:
            async with asyncio.timeout(self._slow_client_timeout_s):
                await send(message)
        except TimeoutError:
            raise SlowClientError(
                f"the client read nothing for {self._slow_client_timeout_s:g} s"
            ) from None

    async def _end_with(self, error: OmniError, send: Send) -> None:
        """Leaves the answer without its end: the server closes the connection."""


class EventStream(ByteStream):
    """Sends server-sent events as they come. A failure behind the first one becomes a last event
    with the error, and no `[DONE]`; in a stream of named events it has the name and `type`
    `error_name`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        *,
        slow_client_timeout_s: float,
        error_name: str | None = None,
    ) -> None:
        super().__init__(events, slow_client_timeout_s=slow_client_timeout_s)
        self._error_name = error_name

    async def _end_with(self, error: OmniError, send: Send) -> None:
        if isinstance(error, RequestCancelledError):
            return
        name = self._error_name
        body = error_body(error) if name is None else {"type": name, **error_body(error)}
        await self._send(send, data_event(json.dumps(body), name=name), more=False)
