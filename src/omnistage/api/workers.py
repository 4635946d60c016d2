"""Threads for what would block the event loop: decoding, encoding, large JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from omnistage.contracts.errors import OverloadedError

P = ParamSpec("P")
T = TypeVar("T")


class MediaWorkers:
    """A small thread pool with a bound on what clients may queue before they are admitted.

    `run` is for work on admitted requests, `run_bounded` for work on their inputs: over the bound
    it raises `OverloadedError` at once.
    """

    def __init__(self, *, threads: int, max_pending: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="omnistage-media")
        self._max_pending = max_pending
        self._pending = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        future = self._pool.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    async def run_bounded(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._pending >= self._max_pending:
            raise OverloadedError(
                f"{self._pending} inputs wait to be read already; try again", retry_after_s=1.0
            )
        future = self._pool.submit(function, *args, **kwargs)
        loop = asyncio.get_running_loop()
        self._pending += 1
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._finish_one))
        return await asyncio.wrap_future(future)

    def _finish_one(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        """Drop what waits; what runs ends by itself. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
