"""From a validated text request to the engine's events: the only place where they meet."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from omnistage.api.context import AppContext
from omnistage.contracts.errors import RequestCancelledError
from omnistage.contracts.outputs import FinishReason, OmniRequestOutput
from omnistage.contracts.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJob:
    """One prompt as the engine takes it, asked for `n` times; `suffix` tells the jobs of one HTTP
    request apart."""

    prompt: dict[str, Any]
    params: list[SamplingParams]
    modalities: tuple[str, ...] = ("text",)
    n: int = 1
    priority: int = 0
    suffix: str = ""


async def run_text(
    context: AppContext, request: Request, job: TextJob
) -> AsyncGenerator[OmniRequestOutput, None]:
    """The engine's events, without its progress. Closing the generator aborts the request.

    Raises `OmniError`.
    """
    context.lifecycle.check_serving()
    events = context.engine.generate(
        job.prompt,  # type: ignore[arg-type]
        None,
        request.state.engine_request_id + job.suffix,
        sampling_params_list=job.params,
        output_modalities=list(job.modalities),
        priority=job.priority,
        trace_context=request.state.trace_context,
        n=job.n,
    )
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if event.error is not None:
                raise event.error
            if event.finish_reason is FinishReason.ABORT:
                raise RequestCancelledError("the request was aborted")
            if event.progress is None:
                yield event
