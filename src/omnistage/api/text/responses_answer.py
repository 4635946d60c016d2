"""The response object, whole or as a stream of events, as OpenAI sends them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request

from omnistage.api.context import AppContext
from omnistage.api.event_stream import data_event
from omnistage.api.protocol.responses import ResponsesRequest
from omnistage.api.text.chat_plan import ChatPlan
from omnistage.api.text.chunks import feed
from omnistage.api.text.responses_items import Event, ItemWriter
from omnistage.api.text.run import run_text
from omnistage.api.text.usage import UsageCount
from omnistage.contracts.errors import InternalError
from omnistage.contracts.modalities import Modality


class ResponseRun:
    """One response. `body` is echoed where OpenAI echoes."""

    def __init__(
        self, context: AppContext, request: Request, body: ResponsesRequest, plan: ChatPlan
    ) -> None:
        self._context = context
        self._request = request
        self._body = body
        self._plan = plan
        self._id = f"resp_{request.state.request_id}"
        self._created_unix_s = int(time.time())
        self._writer = ItemWriter(plan.top_logprobs)
        self._usage = UsageCount()

    async def events(self) -> AsyncGenerator[str, None]:
        """Named events; the last one holds the whole response."""
        async with aclosing(self._events()) as events:
            async for event in events:
                yield data_event(json.dumps(event), name=event["type"])

    async def whole(self) -> dict[str, Any]:
        last: Event | None = None
        async with aclosing(self._events()) as events:
            async for event in events:
                last = event
        assert last is not None
        response: dict[str, Any] = last["response"]
        return response

    async def _events(self) -> AsyncGenerator[Event, None]:
        writer = self._writer
        choice = self._plan.choice(0)
        begun = False
        async with aclosing(run_text(self._context, self._request, self._plan.job)) as events:
            async for event in events:
                self._usage.add(event)
                if event.modality is not Modality.TEXT:
                    continue
                if not begun:
                    begun = True
                    for name in ("response.created", "response.in_progress"):
                        yield writer.event(name, response=self._object("in_progress"))
                for one in writer.feed(feed(choice, event), event.fields.get("logprobs") or []):
                    yield one
        if choice.finish_reason is None:
            raise InternalError("the model finished without an answer")
        complete = choice.finish_reason != "length"
        for one in writer.finish(complete=complete):
            yield one
        status = "completed" if complete else "incomplete"
        yield writer.event(f"response.{status}", response=self._object(status))

    def _object(self, status: str) -> dict[str, Any]:
        body, under_way = self._body, status == "in_progress"
        params = self._plan.job.params[0]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_unix_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self._context.model_name,
            "output": list(self._writer.output),
            "usage": None if under_way else self._usage_fields(),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": False,
            "temperature": getattr(params, "temperature", None),
            "text": {"format": self._format()},
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": [_plain(tool) | {"strict": tool.strict} for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": getattr(params, "top_p", None),
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
            "user": body.user,
        }

    def _format(self) -> Any:
        wanted = self._body.text.format if self._body.text else None
        return {"type": "text"} if wanted is None else _plain(wanted)

    def _usage_fields(self) -> dict[str, Any]:
        """Thoughts are counted among the output only; no write to a cache costs extra here."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _plain(value: Any) -> Any:
    return value.model_dump(by_alias=True) if hasattr(value, "model_dump") else value
