"""The media of a conversation, read and decoded."""

from __future__ import annotations

from typing import Any

from omnistage.api.context import AppContext
from omnistage.api.media_audio import input_audio_url
from omnistage.api.protocol.messages import AudioUrlPart, InputAudioPart
from omnistage.api.text.conversation import Conversation


async def multi_modal_data(
    context: AppContext, conversation: Conversation, processor_arguments: dict[str, Any]
) -> dict[str, Any]:
    """Lists by kind, in the order of the messages' indices. Raises `InvalidRequestError`."""
    found: dict[str, Any] = {}
    if conversation.images:
        found["image"] = await context.pictures.from_urls(conversation.images)
    if conversation.audios:
        urls = [(param, _audio_url(param, part)) for param, part in conversation.audios]
        sounds = await context.sounds.from_urls(urls)
        found["audio"] = [sound.as_input() for sound in sounds]
    if conversation.videos:
        clips = await context.videos.from_urls(
            conversation.videos, with_sound=processor_arguments.get("use_audio_in_video") is True
        )
        found["video"] = [clip.as_input() for clip in clips]
    return found


def _audio_url(param: str, part: AudioUrlPart | InputAudioPart) -> str:
    if isinstance(part, AudioUrlPart):
        return part.audio_url.url
    return input_audio_url(part.input_audio.data, part.input_audio.format, _parent(param))


def _parent(param: str) -> str:
    return param.rpartition(".")[0]
