"""The stream of one request: the orchestrator puts, the caller takes; bounded, never blocking.

Partial outputs are bounded by the stages' credits, which come back only when the caller takes
them. Progress is coalesced: only the newest of each child at each stage waits. Of previews, which
a later event replaces, the newest `MAX_PARTIAL_IMAGES` wait; they never make a stream full.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omnistage.contracts.errors import OmniError
from omnistage.contracts.outputs import OmniRequestOutput
from omnistage.contracts.sampling import MAX_PARTIAL_IMAGES

Source = tuple[int | None, int]
"""(stage, child)."""


@dataclass(slots=True, eq=False)
class _Item:
    output: OmniRequestOutput
    on_taken: Callable[[], None] | None = None

    @property
    def source(self) -> Source:
        return (self.output.stage_id, self.output.child_index)


class OutputStream:
    """`put` and `fail` until one terminal event; `get` until it has been taken.

    The stream is full while some child's credits at some stage (`windows`, by stage) are all
    unread here, or `buffer` partial outputs in all: the caller is what this request waits for.
    """

    def __init__(
        self, windows: Mapping[int, int], buffer: int, on_full: Callable[[bool], None]
    ) -> None:
        self._items: deque[_Item] = deque()
        self._windows = windows
        self._buffer = buffer
        self._on_full = on_full
        self._unread: Counter[Source] = Counter()
        self._progress: dict[Source, _Item] = {}
        self._full = False
        self._error: OmniError | None = None
        self._finished = False
        self._arrived = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self._finished

    def __len__(self) -> int:
        return len(self._items)

    def put(self, output: OmniRequestOutput, on_taken: Callable[[], None] | None = None) -> None:
        """Add an event; `on_taken` is called when the caller has taken it."""
        assert not self._finished, "an event after the terminal one"
        item = _Item(output, on_taken)
        if output.progress is not None:
            older = self._progress.pop(item.source, None)
            if older is not None:
                self._items.remove(older)
            self._progress[item.source] = item
        if output.is_preview:
            self._make_room(item.source)
        self._items.append(item)
        self._finished = output.finished
        if on_taken is not None:
            self._unread[item.source] += 1
            self._tell_full()
        self._arrived.set()

    def fail(self, error: OmniError) -> None:
        """The terminal event of a request that failed or was cancelled; unread events are gone."""
        assert not self._finished, "a failure after the terminal event"
        self._items.clear()
        self._progress.clear()
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
        if self._progress.get(item.source) is item:
            del self._progress[item.source]
        if item.on_taken is not None:
            item.on_taken()
            self._unread[item.source] -= 1
            self._tell_full()
        return item.output

    def _make_room(self, source: Source) -> None:
        waiting = [i for i in self._items if i.output.is_preview and i.source == source]
        if len(waiting) == MAX_PARTIAL_IMAGES:
            self._items.remove(waiting[0])

    def _tell_full(self) -> None:
        full = self._unread.total() >= self._buffer or any(
            count >= self._windows[stage_id]
            for (stage_id, _), count in self._unread.items()
            if stage_id is not None
        )
        if full != self._full:
            self._full = full
            self._on_full(full)
