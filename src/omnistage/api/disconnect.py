"""A client that hangs up ends its request, at once and everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from omnistage.contracts.errors import RequestCancelledError

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the server reports a hang-up.

    The request's body must have been read. Raises `RequestCancelledError` after a hang-up.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
    finally:
        await _end(worker, watcher)
    raise RequestCancelledError("the client closed the connection")


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
