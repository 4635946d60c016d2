"""The sequences that an executor holds: device rows, block tables, and what was sent of them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from omnistage.ar.model import RunningSequence, TokenModel
from omnistage.ar.sampling.row_state import SamplerState
from omnistage.ar.step import StepRow
from omnistage.ar.step_input import DecodeInput
from omnistage.contracts.identity import RequestKey


@dataclass(slots=True, eq=False)
class Running:
    """`prompt_sent`: later stages have got what they need of the prompt."""

    sequence: RunningSequence
    blocks: list[int] = field(default_factory=list)
    prompt_sent: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.sequence.prompt.token_ids)

    def slot(self, index: int, block_size: int) -> int:
        return self.blocks[index // block_size] * block_size + index % block_size

    def slots(self, first: int, last: int, block_size: int) -> list[int]:
        return [self.slot(index, block_size) for index in range(first, last)]


class SequenceTable:
    """Gives each sequence a row of per-sequence device state, the lowest that is free."""

    def __init__(
        self, model: TokenModel, state: SamplerState, step_input: DecodeInput, *, max_num_seqs: int
    ) -> None:
        self._model = model
        self._state = state
        self._input = step_input
        self._free = list(range(max_num_seqs))
        self._running: dict[RequestKey, Running] = {}
        self._encoded: dict[RequestKey, dict[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def keys(self) -> list[RequestKey]:
        return list(self._running)

    def keep_media(self, key: RequestKey, media: dict[int, Any]) -> None:
        """Encoders' results by item index, for a sequence that runs or will."""
        running = self._running.get(key)
        if running is not None:
            running.sequence.media |= media
        else:
            self._encoded[key] = media

    def take_in(self, row: StepRow) -> Running:
        """What a step's row says of its sequence, before it is computed. Raises what the model or
        the sampler has against it."""
        key = row.identity.key
        if row.begin is not None:
            self.release(key, keep_media=True)
            self._begin(row)
        running = self._running[key]
        if row.restart is not None:
            running.sequence.token_ids = list(row.restart)
        if row.begin is not None or row.restart is not None:
            self._make_state(running)
        if row.blocks is not None:
            running.blocks = row.blocks
            self._input.set_table(running.sequence.row, row.blocks)
        for data in row.appended:
            self._model.append(running.sequence, data)
        if row.input_complete and not running.sequence.input_complete:
            running.sequence.input_complete = True
            self._model.finish_input(running.sequence)
        return running

    def release(self, key: RequestKey, *, keep_media: bool = False) -> None:
        """Free the row. Unknown keys are ignored."""
        if not keep_media:
            self._encoded.pop(key, None)
        running = self._running.pop(key, None)
        if running is None:
            return
        row = running.sequence.row
        heapq.heappush(self._free, row)
        self._state.release(row)
        self._model.release(running.sequence)

    def _begin(self, row: StepRow) -> None:
        key, begin = row.identity.key, row.begin
        assert begin is not None
        sequence = RunningSequence(
            prompt=begin.prompt,
            params=begin.params,
            row=heapq.heappop(self._free),
            token_ids=list(begin.prompt.token_ids),
            media=self._encoded.pop(key, {}),
            input_complete=False,
            seed=begin.seed,
        )
        self._running[key] = Running(sequence)

    def _make_state(self, running: Running) -> None:
        sequence, params = running.sequence, running.sequence.params
        prompt_tokens = running.prompt_tokens
        self._model.begin(sequence)
        self._state.begin(
            sequence.row,
            params,
            prompt_ids=sequence.token_ids[:prompt_tokens],
            generated_ids=sequence.token_ids[prompt_tokens:],
            seed=sequence.seed,
            penalized=sequence.prompt.penalized,
            stop_ids=(*self._model.eos_token_ids, *params.stop_token_ids),
        )
