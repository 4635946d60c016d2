"""The stream of one request: the orchestrator puts, the caller takes; bounded, never blocking.

Partial outputs are bounded by the stages' credits, which come back only when the caller takes
them. Progress is coalesced: only the newest of a stage waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from omnistage.contracts.errors import OmniError
from omnistage.contracts.outputs import OmniRequestOutput


@dataclass(slots=True)
class _Item:
    output: OmniRequestOutput
    on_taken: Callable[[], None] | None = None


class OutputStream:
    """`put` and `fail` until one terminal event; `get` until it has been taken."""

    def __init__(self, window: int, on_full: Callable[[bool], None]) -> None:
        self._items: deque[_Item] = deque()
        self._window = window
        self._on_full = on_full
        self._unread_partials = 0
        self._full = False
        self._error: OmniError | None = None
        self._finished = False
        self._arrived = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self._finished

    def put(self, output: OmniRequestOutput, on_taken: Callable[[], None] | None = None) -> None:
        """Add an event; `on_taken` is called when the caller has taken it."""
        assert not self._finished, "an event after the terminal one"
        if output.progress is not None:
            self._drop_older_progress(output)
        self._items.append(_Item(output, on_taken))
        self._finished = output.finished
        self._count(+1 if on_taken is not None else 0)
        self._arrived.set()

    def fail(self, error: OmniError) -> None:
        """The terminal event of a request that failed or was cancelled; unread events are gone."""
        assert not self._finished, "a failure after the terminal event"
        self._items.clear()
        self._error = error
        self._finished = True
        self._arrived.set()

    async def get(self) -> OmniRequestOutput:
        """The next event. Raises the request's error."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        if item.on_taken is not None:
            item.on_taken()
            self._count(-1)
        return item.output

    def _drop_older_progress(self, output: OmniRequestOutput) -> None:
        if self._items and self._items[-1].output.progress is not None:
            last = self._items[-1].output
            if (last.stage_id, last.child_index) == (output.stage_id, output.child_index):
                self._items.pop()

    def _count(self, change: int) -> None:
        self._unread_partials += change
        full = self._unread_partials >= self._window
        if full != self._full:
            self._full = full
            self._on_full(full)
