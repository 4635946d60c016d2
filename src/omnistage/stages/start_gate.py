"""Waiting for the first start: every replica is ready, or the first failure says why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omnistage.contracts.errors import OmniError, StageLostError


class StartGate:
    """One engine's first start. Its methods are called on the event loop."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._change = asyncio.Event()
        self._error: OmniError | None = None
        self.open = False
        """Whether the start is over, well."""

    def changed(self) -> None:
        """Some replica's state is another one now."""
        self._change.set()

    def fail(self, error: OmniError) -> None:
        """The start has failed; only the first reason counts."""
        self._error = self._error or error
        self._change.set()

    async def wait(self, timeout_s: float) -> None:
        """Raises the first failure, `StageLostError` when nothing comes of it in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._error is None and not self._is_ready():
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            self.fail(StageLostError(f"the stages did not become ready within {timeout_s:g} s"))
        if self._error is not None:
            raise self._error
        self.open = True
