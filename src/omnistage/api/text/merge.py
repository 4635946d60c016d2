"""The events of several jobs of one HTTP request, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import Request

from omnistage.api.context import AppContext
from omnistage.api.text.run import TextJob, run_text
from omnistage.contracts.outputs import OmniRequestOutput

_WAITING_EVENTS = 16

Numbered = tuple[int, OmniRequestOutput]
"""An event with the number of its job."""


class _End:
    """A job is over, well or with an error."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def run_jobs(
    context: AppContext, request: Request, jobs: Sequence[TextJob]
) -> AsyncGenerator[Numbered, None]:
    """All jobs at once. The first failure ends the others and is raised; closing aborts all."""
    queue: asyncio.Queue[Numbered | _End] = asyncio.Queue(_WAITING_EVENTS)
    tasks = [
        asyncio.create_task(_pump(run_text(context, request, job), number, queue))
        for number, job in enumerate(jobs)
    ]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
                continue
            running -= 1
            if item.error is not None:
                raise item.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    events: AsyncGenerator[OmniRequestOutput, None],
    number: int,
    queue: asyncio.Queue[Numbered | _End],
) -> None:
    end = _End(None)
    try:
        async with aclosing(events):
            async for event in events:
                await queue.put((number, event))
    except Exception as error:
        end = _End(error)  # Raised by the reader.
    await queue.put(end)
