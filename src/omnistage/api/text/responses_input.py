"""From a responses body to the chat body that means the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from omnistage.api.protocol.chat_text import TextChatRequest
from omnistage.api.protocol.response_items import (
    FunctionCallItem,
    FunctionOutputItem,
    InputAudioItem,
    InputImage,
    Item,
    MessageItem,
    ReasoningItem,
    Refusal,
)
from omnistage.api.protocol.responses import FunctionChoice, ResponsesRequest, SchemaFormat
from omnistage.api.protocol.sampling import SamplingKnobs
from omnistage.contracts.errors import InvalidRequestError, UnsupportedCombinationError

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(slots=True)
class _Turns:
    """Chat messages, each with the place of the input item that it came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)

    def add(self, message: dict[str, Any], place: int | None) -> dict[str, Any]:
        self.messages.append(message)
        self.places.append(place)
        return message

    def assistant(self, place: int) -> dict[str, Any]:
        """The answer under way: its thought, text and calls are items of their own here."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self.add({"role": "assistant"}, place)


def as_chat(body: ResponsesRequest) -> tuple[TextChatRequest, list[int | None]]:
    """The chat, and for each of its messages the input item behind it.

    Raises `InvalidRequestError`.
    """
    if body.top_logprobs is not None and not body.include:
        raise UnsupportedCombinationError(
            "top_logprobs needs include: ['message.output_text.logprobs']", param="top_logprobs"
        )
    turns = _turns(body)
    knobs = {
        name: getattr(body, name)
        for name in SamplingKnobs.model_fields
        if name != "max_tokens" and getattr(body, name) is not None
    }
    chat = TextChatRequest.model_construct(
        **knobs,
        messages=_messages(turns),
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        logprobs=bool(body.include),
        top_logprobs=body.top_logprobs,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        **_choices(body),
    )
    return chat, turns.places


def _messages(turns: _Turns) -> Any:
    probe = TextChatRequest.model_validate({"messages": turns.messages})
    return probe.messages


def _choices(body: ResponsesRequest) -> dict[str, Any]:
    """Tools, tool choice and format in the chat's shapes."""
    given: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}
    if body.tools:
        given["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        given["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        given["tool_choice"] = choice
    wanted = body.text.format if body.text else None
    if isinstance(wanted, SchemaFormat):
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted is not None:
        given["response_format"] = {"type": wanted.type}
    probe = TextChatRequest.model_validate(given)
    return {name: getattr(probe, name) for name in ("tools", "tool_choice", "response_format")}


def _turns(body: ResponsesRequest) -> _Turns:
    turns = _Turns()
    if body.instructions is not None:
        turns.add({"role": "system", "content": body.instructions}, None)
    if isinstance(body.input, str):
        turns.add({"role": "user", "content": body.input}, 0)
        return turns
    for place, item in enumerate(body.input):
        _add_item(turns, item, place)
    return turns


def _add_item(turns: _Turns, item: Item, place: int) -> None:
    if isinstance(item, ReasoningItem):
        texts = item.content or item.summary or []
        turns.add(
            {"role": "assistant", "reasoning_content": "\n".join(text.text for text in texts)},
            place,
        )
    elif isinstance(item, FunctionCallItem):
        call = {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        turns.assistant(place).setdefault("tool_calls", []).append(call)
    elif isinstance(item, FunctionOutputItem):
        output = item.output
        text = output if isinstance(output, str) else "\n".join(part.text for part in output)
        turns.add({"role": "tool", "tool_call_id": item.call_id, "content": text}, place)
    else:
        _add_message(turns, item, place)


def _add_message(turns: _Turns, item: MessageItem, place: int) -> None:
    content: Any = item.content
    if not isinstance(content, str):
        content = [_part(part) for part in content]
    last = turns.messages[-1] if turns.messages else {}
    if item.role == "assistant" and "reasoning_content" in last and "content" not in last:
        last["content"] = content
    else:
        turns.add({"role": item.role, "content": content}, place)


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    if isinstance(part, InputAudioItem):
        return part.model_dump()
    if isinstance(part, Refusal):
        return {"type": "refusal", "refusal": part.refusal}
    return {"type": "text", "text": part.text}


def name_inputs(error: InvalidRequestError, places: list[int | None]) -> None:
    """Messages of the chat become the input items that the client sent."""

    def renamed(match: re.Match[str]) -> str:
        place = places[int(match.group(1))] if int(match.group(1)) < len(places) else None
        return "instructions" if place is None else f"input[{place}]"

    if error.param is not None:
        error.param = _MESSAGE.sub(renamed, error.param)
    error.message = _MESSAGE.sub(renamed, error.message)
