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
    """Two small thread pools: a client's input that takes long holds up nobody's output.

    `run` is for what is made for admitted requests, `run_bounded` for reading inputs: over the
    bound on what clients may queue it raises `OverloadedError` at once.
    """

    def __init__(self, *, threads: int, max_pending: int) -> None:
        self._outputs = ThreadPoolExecutor(threads, thread_name_prefix="omnistage-media-out")
        self._inputs = ThreadPoolExecutor(threads, thread_name_prefix="omnistage-media-in")
        self._max_pending = max_pending
        self._pending = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        future = self._outputs.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    async def run_bounded(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._pending >= self._max_pending:
            raise OverloadedError(
                f"{self._pending} inputs wait to be read already; try again", retry_after_s=1.0
            )
        future = self._inputs.submit(function, *args, **kwargs)
        loop = asyncio.get_running_loop()
        self._pending += 1
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._finish_one))
        return await asyncio.wrap_future(future)

    def _finish_one(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        """Drop what waits; what runs ends by itself. Idempotent."""
        for pool in (self._outputs, self._inputs):
            pool.shutdown(wait=False, cancel_futures=True)
