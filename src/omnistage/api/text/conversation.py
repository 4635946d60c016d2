"""From messages to what a chat template takes, and the media they speak of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from omnistage.api.protocol.chat import ImagePart, TextPart
from omnistage.api.protocol.messages import (
    AudioUrlPart,
    InputAudioPart,
    RefusalPart,
    TextMessage,
    VideoUrlPart,
)
from omnistage.contracts.errors import InvalidRequestError


@dataclass(slots=True)
class Conversation:
    """`messages` hold media as `{"type": kind, "index": i}`. The others are pairs of parameter
    name and URL, or, for a sound that came inline, its part."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[tuple[str, str]] = field(default_factory=list)
    audios: list[tuple[str, AudioUrlPart | InputAudioPart]] = field(default_factory=list)
    videos: list[tuple[str, str]] = field(default_factory=list)

    @property
    def kinds(self) -> dict[str, str]:
        """Each kind of media in use, with the parameter that brought the first."""
        found = {"image": self.images, "audio": self.audios, "video": self.videos}
        return {kind: items[0][0] for kind, items in found.items() if items}


def read_messages(messages: list[TextMessage]) -> Conversation:
    """Raises `InvalidRequestError` for tool calls whose arguments are no JSON object."""
    conversation = Conversation()
    for position, message in enumerate(messages):
        conversation.messages.append(_turn(conversation, message, f"messages[{position}]"))
    return conversation


def _turn(conversation: Conversation, message: TextMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _content(conversation, message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"{where}.tool_calls[{i}].function.arguments"
                    ),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return turn


def _arguments(text: str, where: str) -> dict[str, Any]:
    """Templates take a mapping: some write it as JSON, some one tag an entry."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequestError(f"{where}: no JSON: {error}", param=where) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{where}: must be a JSON object, got {type(value).__name__}", param=where
        )
    return value


def _content(
    conversation: Conversation, message: TextMessage, where: str
) -> str | list[dict[str, Any]]:
    if message.content is None:
        spoken = message.audio.transcript if message.audio else None
        if message.audio is not None and spoken is None:
            raise InvalidRequestError(
                f"{where}.audio: earlier speech is not stored here; send its transcript",
                param=f"{where}.audio",
            )
        return spoken or message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    parts = [
        _part(conversation, part, f"{where}.content[{i}]") for i, part in enumerate(message.content)
    ]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(conversation: Conversation, part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal}
    if isinstance(part, ImagePart):
        conversation.images.append((f"{where}.image_url.url", part.image_url.url))
        return {"type": "image", "index": len(conversation.images) - 1}
    if isinstance(part, VideoUrlPart):
        conversation.videos.append((f"{where}.video_url.url", part.video_url.url))
        return {"type": "video", "index": len(conversation.videos) - 1}
    assert isinstance(part, AudioUrlPart | InputAudioPart)
    name = "audio_url.url" if isinstance(part, AudioUrlPart) else "input_audio.data"
    conversation.audios.append((f"{where}.{name}", part))
    return {"type": "audio", "index": len(conversation.audios) - 1}
