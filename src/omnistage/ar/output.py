"""What leaves a token stage, and when: at once, coalesced, or not before somebody reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omnistage.ar.emission import output_data
from omnistage.ar.sequence import TokenSequence
from omnistage.contracts.identity import RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.runtime import Emission

EMISSIONS_PER_STEP = 16
"""First and final emissions do not count: building and sending one takes about as long as a row of
a step on a CPU, and text that waits a step leaves with the next."""


@dataclass(slots=True)
class TokenOutput:
    """Sequences with something that has not left, the longest waiting first."""

    modality: Modality
    has_text: bool
    _unsent: dict[RequestKey, TokenSequence] = field(default_factory=dict)
    _left: int = EMISSIONS_PER_STEP

    def begin_step(self) -> None:
        self._left = EMISSIONS_PER_STEP

    def changed(self, sequence: TokenSequence) -> None:
        self._unsent.setdefault(sequence.key, sequence)

    def forget(self, key: RequestKey) -> None:
        self._unsent.pop(key, None)

    @property
    def is_due(self) -> bool:
        return any(self._may_leave(one) for one in self._unsent.values())

    def emit(self) -> Iterator[Emission]:
        """What leaves now. A sequence whose emission is final is to be dropped."""
        for sequence in list(self._unsent.values()):
            if not self._may_leave(sequence):
                continue
            if not (_is_final(sequence) or sequence.output.emissions == 0):
                if self._left == 0:
                    continue
                self._left -= 1
            del self._unsent[sequence.key]
            yield self._emission(sequence)
            if sequence.output.num_pending:
                self._unsent[sequence.key] = sequence

    def _may_leave(self, sequence: TokenSequence) -> bool:
        if sequence.credits == 0:
            return False
        if _is_final(sequence):
            return True
        if not sequence.output.num_ready:
            return False
        if sequence.feeds or not sequence.params.delta:
            return sequence.feeds
        return sequence.output.has_text or not self.has_text

    def _emission(self, sequence: TokenSequence) -> Emission:
        final, is_first = _is_final(sequence), sequence.output.emissions == 0
        pieces, fields, tensors = sequence.output.take()
        more: dict[str, Any] = {
            "prompt_tokens": sequence.num_prompt,
            "cached_tokens": sequence.cached_tokens,
            "completion_tokens": sequence.output.completion_tokens,
        }
        if is_first and sequence.feeds:
            assert sequence.prompt is not None
            more["prompt_token_ids"] = list(sequence.prompt.token_ids)
        ending = sequence.ending if final else None
        if ending is not None:
            more["stop_reason"] = ending.stop_reason
        if sequence.credits is not None:
            sequence.credits -= 1
        return Emission(
            identity=sequence.identity,
            data=output_data(self.modality, pieces, fields, tensors, more),
            final=final,
            finish_reason=ending.finish_reason if ending is not None else None,
            timings_s=sequence.timings_s() if final else {},
        )


def _is_final(sequence: TokenSequence) -> bool:
    return sequence.ending is not None and sequence.output.is_whole
