"""Texts and sounds of a stream put together, one answer a child."""

from __future__ import annotations

import numpy as np

from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import CompletionOutput, OmniRequestOutput

AUDIO, SAMPLE_RATE = "audio", "sample_rate"
_TOKEN_IDS = "token_ids"


def is_answer(output: OmniRequestOutput) -> bool:
    """Whether an event adds to a text or a sound."""
    if output.modality is Modality.AUDIO:
        return AUDIO in output.tensors
    return output.modality is Modality.TEXT and _TOKEN_IDS in output.fields


def added(output: OmniRequestOutput) -> CompletionOutput:
    """What an event adds. Its tensors are arrays."""
    if output.modality is Modality.AUDIO:
        return CompletionOutput(
            index=output.child_index,
            audio=np.asarray(output.tensors[AUDIO], dtype=np.float32).reshape(-1),
            sample_rate=output.fields.get(SAMPLE_RATE),
        )
    return CompletionOutput(
        index=output.child_index,
        text=output.text or "",
        token_ids=list(output.fields[_TOKEN_IDS]),
        logprobs=output.fields.get("logprobs"),
        finish_reason=output.finish_reason,
        stop_reason=output.fields.get("stop_reason"),
    )


class Answers:
    """`add` every event, then `whole`."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[CompletionOutput]] = {}

    def add(self, output: OmniRequestOutput) -> None:
        if is_answer(output):
            self._pieces.setdefault(output.child_index, []).append(added(output))

    def whole(self) -> list[CompletionOutput]:
        """In the order of the children."""
        return [_joined(index, pieces) for index, pieces in sorted(self._pieces.items())]


def _joined(index: int, pieces: list[CompletionOutput]) -> CompletionOutput:
    whole = CompletionOutput(index=index, text="".join(piece.text for piece in pieces))
    sounds: list[np.ndarray] = []
    for piece in pieces:
        whole.token_ids += piece.token_ids
        if piece.logprobs is not None:
            whole.logprobs = (whole.logprobs or []) + piece.logprobs
        if piece.audio is not None:
            sounds.append(piece.audio)
            whole.sample_rate = piece.sample_rate
        whole.finish_reason = piece.finish_reason or whole.finish_reason
        whole.stop_reason = piece.stop_reason if piece.finish_reason else whole.stop_reason
    if sounds:
        whole.audio = np.concatenate(sounds)
    return whole
