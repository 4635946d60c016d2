"""What a sequence has generated and not sent yet, and how it becomes one emission."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData


@dataclass(slots=True)
class Piece:
    """One token with the text that may leave with it."""

    token_id: int
    text: str
    logprob: dict[str, Any] | None = None


@dataclass(slots=True)
class OutputBuffer:
    """Pieces in order. With `with_payload` each leaves together with its payload, which comes
    later; payloads come in the order of the pieces, and those beyond the last one are dropped."""

    with_payload: bool = False
    completion_tokens: int = 0
    emissions: int = 0
    _pieces: deque[Piece] = field(default_factory=deque)
    _payloads: deque[StageData] = field(default_factory=deque)
    _text_length: int = 0

    def push(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._text_length += len(piece.text)

    def push_payload(self, payload: StageData) -> None:
        self._payloads.append(payload)

    @property
    def num_pending(self) -> int:
        """Tokens that have not left."""
        return len(self._pieces)

    @property
    def num_ready(self) -> int:
        """Tokens that may leave."""
        if not self.with_payload:
            return len(self._pieces)
        return min(len(self._pieces), len(self._payloads))

    @property
    def is_whole(self) -> bool:
        """Nothing that is to leave is still being built."""
        return self.num_ready == len(self._pieces)

    @property
    def has_text(self) -> bool:
        return self._text_length > 0

    def take(self) -> tuple[list[Piece], dict[str, Any], dict[str, Any]]:
        """All that may leave: pieces, and their payloads' fields and tensors, joined."""
        count = self.num_ready
        pieces = [self._pieces.popleft() for _ in range(count)]
        self._text_length -= sum(len(piece.text) for piece in pieces)
        self.completion_tokens += count
        self.emissions += 1
        if not self.with_payload:
            return pieces, {}, {}
        payloads = [self._payloads.popleft() for _ in range(count)]
        fields: dict[str, Any] = {}
        for payload in payloads:
            fields.update(payload.fields)
        return pieces, fields, join_tensors([payload.tensors for payload in payloads])


def output_data(
    modality: Modality,
    pieces: Sequence[Piece],
    payload_fields: dict[str, Any],
    tensors: dict[str, Any],
    more: dict[str, Any],
) -> StageData:
    """The data of a token stage's emission."""
    fields: dict[str, Any] = {
        **payload_fields,
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [piece.token_id for piece in pieces],
        **more,
    }
    if any(piece.logprob is not None for piece in pieces):
        fields["logprobs"] = [piece.logprob for piece in pieces]
    return StageData(modality=modality, fields=fields, tensors=tensors)


def join_tensors(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Tensors of the same name, joined along dimension 0 in order."""
    by_name: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            by_name.setdefault(name, []).append(value)
    return {name: _join(values) for name, values in by_name.items()}


def _join(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if type(values[0]).__module__.partition(".")[0] == "torch":
        import torch

        return torch.cat(values)
    import numpy as np

    return np.concatenate(values)
