"""The chunks of one choice of a streamed chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from omnistage.api.audio_render import AudioDeltas
from omnistage.api.text.chat_plan import ChatPlan
from omnistage.api.text.choice import Choice, Piece, ToolPiece
from omnistage.api.text.logprobs import chat_logprobs
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InternalError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import OmniRequestOutput

Chunk = dict[str, Any]


class ChoiceStream:
    """Events in, `choices[0]` of each chunk out. The chunk with the finish reason is the last."""

    def __init__(
        self, choice: Choice, plan: ChatPlan, audio_id: str, workers: MediaWorkers
    ) -> None:
        self._choice = choice
        self._plan = plan
        self._workers = workers
        self._audio: AudioDeltas | None = None
        if plan.audio_format is not None:
            self._audio = AudioDeltas(audio_id=audio_id, audio_format=plan.audio_format)
        self._begun = False
        self._over = False
        self._held_logprobs: list[dict[str, Any]] = []

    async def chunks(self, event: OmniRequestOutput) -> AsyncGenerator[Chunk, None]:
        if not self._begun:
            self._begun = True
            yield self._chunk({"role": "assistant", "content": ""})
        if event.modality is Modality.TEXT:
            for chunk in self._text(event):
                yield chunk
        elif event.modality is Modality.AUDIO and self._audio is not None:
            delta = await self._audio.chunk(self._workers, event)
            if delta is not None:
                yield self._chunk({"audio": delta})
            if not event.partial:
                async for chunk in self.finish():
                    yield chunk

    async def finish(self) -> AsyncGenerator[Chunk, None]:
        """Once, when text and sound are complete. Raises `InternalError` when no text came."""
        if self._over:
            return
        if self._choice.finish_reason is None:
            raise InternalError("the model finished without an answer")
        self._over = True
        if self._audio is not None:
            last = await self._audio.finish(self._workers)
            if last is None:
                raise InternalError("the model finished without a sound")
            yield self._chunk({"audio": last})
        yield self._last()

    def _text(self, event: OmniRequestOutput) -> list[Chunk]:
        choice = self._choice
        piece = feed(choice, event)
        choice.calls += [call for call in piece.calls if call.id is not None]
        self._held_logprobs += event.fields.get("logprobs") or []
        found = [self._chunk(delta) for delta in self._deltas(piece)]
        if found:
            found[0]["logprobs"] = self._take_logprobs()
        if not event.partial and self._audio is None:
            self._over = True
            found.append(self._last())
        return found

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if piece.reasoning:
            found.append({"reasoning_content": piece.reasoning})
        if piece.content:
            found.append({"content": piece.content})
            if self._audio is not None:
                found[-1]["audio"] = self._audio.transcript(piece.content)
        found += [{"tool_calls": [_call_delta(call)]} for call in piece.calls]
        return found

    def _last(self) -> Chunk:
        chunk = self._chunk({})
        chunk["logprobs"] = self._take_logprobs()
        chunk["finish_reason"] = chat_finish_reason(self._choice, self._plan)
        chunk["stop_reason"] = self._choice.stop_reason
        return chunk

    def _take_logprobs(self) -> dict[str, Any] | None:
        if self._plan.top_logprobs is None or not self._held_logprobs:
            return None
        taken, self._held_logprobs = self._held_logprobs, []
        return chat_logprobs(taken, self._plan.top_logprobs)

    def _chunk(self, delta: dict[str, Any]) -> Chunk:
        return {
            "index": self._choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }


def feed(choice: Choice, event: OmniRequestOutput) -> Piece:
    """What a text event adds; its end flushes what was held back."""
    piece = choice.reader.feed(event.text or "")
    if not event.partial:
        piece.extend(choice.reader.finish())
        choice.finish_reason = str(event.finish_reason or "stop")
        choice.stop_reason = event.fields.get("stop_reason")
    return piece


def chat_finish_reason(choice: Choice, plan: ChatPlan) -> str:
    """As OpenAI: a function that was demanded by name ends the answer like any text."""
    called = choice.calls and not plan.tools.named and choice.finish_reason == "stop"
    return "tool_calls" if called else choice.finish_reason or "stop"


def _call_delta(call: ToolPiece) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
