"""Messages to text by the checkpoint's own chat template, with errors that a client can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from omnistage.contracts.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MEDIA_KINDS = ("image", "audio", "video")

_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_NOT_FOR_CLIENTS = (
    "conversation",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
    "load_audio_from_video",
)
"""What `apply_chat_template` would take for itself; a template is code and comes from the model."""


def render_chat(
    renderer: Any,
    messages: Any,
    tools: Any = None,
    kwargs: Any = None,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> str:
    """The text of a chat, special tokens included.

    `renderer` is a tokenizer or a processor. Messages are OpenAI's (role, content as text or parts,
    tool_calls …); media parts are `{"type": "image" | "audio" | "video"}`. `tools` are OpenAI's,
    `kwargs` further variables of the template. The assistant's turn is begun unless the last
    message is to be continued. Raises `InvalidRequestError` naming the field.
    """
    if not getattr(renderer, "chat_template", None):
        raise InvalidRequestError(
            "this model has no chat template: send a prompt (/v1/completions) instead of messages",
            param="messages",
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    variables = _checked_kwargs(kwargs)
    tools = _checked_tools(tools)
    return _rendered(
        renderer,
        prepared_messages(messages, renderer),
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **variables,
    )


def _rendered(renderer: Any, messages: list[dict[str, Any]], **arguments: Any) -> str:
    try:
        text: str = renderer.apply_chat_template(messages, tokenize=False, **arguments)
    except Exception as error:  # a template raises whatever its filters do
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {reason}", param="messages"
        ) from error
    return text


def prepared_messages(messages: Any, renderer: Any) -> list[dict[str, Any]]:
    """Messages as templates want them: roles they know, arguments of tool calls as objects, parts
    that are all text joined by lines where the template does not take parts."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequestError("messages must be a list of at least one", param="messages")
    prepared = [
        _prepared(message, f"messages[{place}]", renderer) for place, message in enumerate(messages)
    ]
    if any(isinstance(message.get("content"), list) for message in prepared):
        joined = not takes_parts(renderer)
        for message in prepared:
            parts = message.get("content")
            if joined and isinstance(parts, list) and all(p["type"] == "text" for p in parts):
                message["content"] = "\n".join(part["text"] for part in parts)
    return prepared


def takes_parts(renderer: Any) -> bool:
    """Whether the template renders content that is a list of parts: found by trying."""
    mark = "one part of text"
    message = {"role": "user", "content": [{"type": "text", "text": mark}]}
    try:
        text = _rendered(renderer, [message], add_generation_prompt=False)
    except InvalidRequestError:
        return False
    return mark in text and "'type'" not in text and '"type"' not in text


def _prepared(message: Any, param: str, renderer: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{param} must be an object", param=param)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{param}.role is {role!r}; allowed: {', '.join(ROLES)}", param=f"{param}.role"
        )
    changed = dict(message)
    if role == "developer" and "developer" not in str(renderer.chat_template):
        changed["role"] = "system"  # what OpenAI calls the system's messages since its o1
    if isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str):
        changed["content"] = [
            _part(part, f"{param}.content[{place}]")
            for place, part in enumerate(message["content"])
        ]
    if message.get("tool_calls"):
        changed["tool_calls"] = [_tool_call(call, param) for call in message["tool_calls"]]
    return changed


def _part(part: Any, param: str) -> dict[str, Any]:
    kinds = ("text", *MEDIA_KINDS)
    if not isinstance(part, Mapping) or part.get("type") not in kinds:
        shown = part.get("type") if isinstance(part, Mapping) else part
        raise InvalidRequestError(
            f"{param} is of type {shown!r}; allowed: {', '.join(kinds)}", param=param
        )
    if part["type"] == "text" and not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{param}.text must be a string", param=param)
    return dict(part)


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    """With its arguments parsed: OpenAI sends them as text, templates write them themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"{param}.tool_calls: each needs a function with a name", param=f"{param}.tool_calls"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InvalidRequestError(
                f"{param}.tool_calls: the arguments of {function['name']!r} are no JSON: {error}",
                param=f"{param}.tool_calls",
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError("tools must be a list of objects", param="tools")
    return [dict(tool) for tool in tools]


def _checked_kwargs(kwargs: Any) -> dict[str, Any]:
    if not kwargs:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidRequestError(
            "chat_template_kwargs must be an object", param="chat_template_kwargs"
        )
    for name in kwargs:
        if name in _OWN_FIELDS:
            raise InvalidRequestError(
                f"chat_template_kwargs: {name!r} is a field of the request itself",
                param="chat_template_kwargs",
            )
        if name in _NOT_FOR_CLIENTS:
            raise InvalidRequestError(
                f"chat_template_kwargs: {name!r} is no variable of a template",
                param="chat_template_kwargs",
            )
    return dict(kwargs)
