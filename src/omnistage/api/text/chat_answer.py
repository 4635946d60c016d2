"""A chat's answer in one piece, or as the chunks of a stream, as OpenAI sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from omnistage.api.audio_render import AudioMessage
from omnistage.api.context import AppContext
from omnistage.api.event_stream import DONE, data_event
from omnistage.api.text.chat_plan import ChatPlan
from omnistage.api.text.choice import Choice, ToolPiece
from omnistage.api.text.chunks import ChoiceStream, chat_finish_reason, feed
from omnistage.api.text.logprobs import chat_logprobs
from omnistage.api.text.run import run_text
from omnistage.api.text.usage import UsageCount
from omnistage.contracts.errors import InternalError
from omnistage.contracts.modalities import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What does not change between the chunks of one answer."""

    id: str
    created_unix_s: int
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "system_fingerprint": None,
        }


@dataclass(slots=True)
class _Whole:
    choice: Choice
    audio: AudioMessage | None
    entries: list[dict[str, Any]] = field(default_factory=list)


async def whole_answer(
    context: AppContext, request: Request, plan: ChatPlan, head: Head
) -> dict[str, Any]:
    """The body of an answer in one piece."""
    usage = UsageCount()
    answers = [
        _Whole(plan.choice(index), _audio_message(head, plan, index)) for index in range(plan.job.n)
    ]
    async with aclosing(run_text(context, request, plan.job)) as events:
        async for event in events:
            usage.add(event)
            answer = answers[event.child_index]
            if answer.audio is not None and answer.audio.add(event):
                continue
            if event.modality is Modality.TEXT:
                answer.choice.add(feed(answer.choice, event))
                answer.entries += event.fields.get("logprobs") or []
    choices = [await _render(context, plan, answer) for answer in answers]
    return {**head.fields("chat.completion"), "choices": choices, "usage": usage.whole()}


def _audio_message(head: Head, plan: ChatPlan, index: int) -> AudioMessage | None:
    if plan.audio_format is None:
        return None
    return AudioMessage(audio_id=audio_id(head, index), audio_format=plan.audio_format)


def audio_id(head: Head, index: int) -> str:
    return f"audio-{head.id.removeprefix('chatcmpl-')}-{index}"


async def _render(context: AppContext, plan: ChatPlan, answer: _Whole) -> dict[str, Any]:
    choice = answer.choice
    if choice.finish_reason is None:
        raise InternalError("the model finished without an answer")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.content or (None if choice.calls else ""),
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    if answer.audio is not None:
        message["audio"] = await answer.audio.render(context.workers, choice.content)
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None
        if plan.top_logprobs is None
        else chat_logprobs(answer.entries, plan.top_logprobs),
        "finish_reason": chat_finish_reason(choice, plan),
        "stop_reason": choice.stop_reason,
    }


def _call(call: ToolPiece) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


async def chunks(
    context: AppContext, request: Request, plan: ChatPlan, head: Head
) -> AsyncGenerator[str, None]:
    """Each choice: its role, its pieces, its finish reason; then the usage where it is wanted."""
    usage = UsageCount()
    fields = head.fields("chat.completion.chunk")
    if plan.include_usage:
        fields["usage"] = None
    streams = [
        ChoiceStream(plan.choice(i), plan, audio_id(head, i), context.workers)
        for i in range(plan.job.n)
    ]
    async with aclosing(run_text(context, request, plan.job)) as events:
        async for event in events:
            usage.add(event)
            async for choice in streams[event.child_index].chunks(event):
                yield data_event(json.dumps({**fields, "choices": [choice]}))
    for stream in streams:
        async for choice in stream.finish():
            yield data_event(json.dumps({**fields, "choices": [choice]}))
    if plan.include_usage:
        yield data_event(json.dumps({**fields, "choices": [], "usage": usage.whole()}))
    yield DONE
