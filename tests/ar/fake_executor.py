"""An executor without a model: its cache holds token ids, its next token is a function of all that
it reads there, so that a block shared or overwritten wrongly changes what is generated."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omnistage.ar.prompt import PreparedPrompt
from omnistage.ar.step import (
    COLLECT,
    DESCRIBE,
    ENCODE,
    PREPARE,
    STEP,
    StepOutcome,
    StepPlan,
    StepRow,
    TokenLogprobs,
)
from omnistage.contracts.errors import InvalidRequestError, OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, StageRequest

EOS = 0
VOCABULARY = 97
Late = tuple[RequestIdentity, StageData | OmniError]


def next_token(context: Sequence[int], allowed: np.ndarray | None = None) -> int:
    token = zlib.crc32(np.asarray(context, dtype="<i8").tobytes()) % (VOCABULARY - 1) + 1
    if allowed is None:
        return token
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:VOCABULARY]
    choices = np.flatnonzero(bits)
    return int(choices[token % len(choices)])


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What a sequence generates when it is alone."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class FakeTokenizer:
    """Id n is the character with code 32 + n; the end of sequence is no text."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(32 + one) for one in ids if one != EOS)


class FakeDetokenizer:
    def __init__(
        self, tokenizer: FakeTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer

    def push(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def finish(self) -> str:
        return ""


class FakeGrammar:
    """Allows ids 3, 4, 5, 6, … one after another, then the end: of `compiled` ids, a number."""

    def __init__(self, compiled: Any) -> None:
        self.length = compiled
        self.accepted = 0

    def bitmask(self) -> np.ndarray:
        allowed = 3 + self.accepted if self.accepted < self.length else EOS
        mask = np.zeros(-(-VOCABULARY // 32), dtype=np.int32)
        mask[allowed // 32] = 1 << (allowed % 32)
        return mask

    def accept(self, token: int) -> None:
        assert token == (3 + self.accepted if self.accepted < self.length else EOS)
        self.accepted += 1

    def is_terminated(self) -> bool:
        return self.accepted > self.length


@dataclass
class _Row:
    tokens: list[int]
    blocks: list[int]
    last_token: int | None = None
    received: int = 0


@dataclass
class FakeExecutor:
    num_blocks: int = 64
    block_size: int = 4
    lag: int = 0
    max_model_len: int = 128
    max_num_seqs: int = 8
    tokenizer: Any = field(default_factory=FakeTokenizer)
    payloads: bool = False
    forced: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that a request generates, by request id, instead of the function's."""
    media: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, PreparedPrompt] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)
    fail_steps: list[OmniError] = field(default_factory=list)
    fail_if: Any = None
    rows: dict[RequestKey, _Row] = field(default_factory=dict)
    _waiting: list[StepOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = np.full((self.num_blocks, self.block_size), -1, dtype=np.int64)

    def execute(self, command: Command) -> StageData:
        fields = command.data.fields
        if command.name == DESCRIBE:
            return _data(
                tokenizer=self.tokenizer,
                eos_token_ids=frozenset({EOS}),
                vocab_size=VOCABULARY,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_model_len=self.max_model_len,
                lag=self.lag,
            )
        if command.name == PREPARE:
            self.late += [(one.identity, self._prepare(one)) for one in fields["requests"]]
            return _data()
        if command.name == ENCODE:
            self.encoded.append(fields["identity"].request_id)
            return _data()
        outcomes: list[StepOutcome] = []
        if command.name == STEP:
            self._waiting.append(self._step(fields["plan"]))
            if len(self._waiting) > self.lag:
                outcomes.append(self._waiting.pop(0))
        else:
            assert command.name == COLLECT
            outcomes, self._waiting = self._waiting, []
        return _data(outcomes=outcomes)

    def release(self, key: RequestKey) -> None:
        self.rows.pop(key, None)

    def _prepare(self, request: StageRequest) -> StageData | OmniError:
        name = request.identity.request_id
        if name in self.prompts:
            return _data(prompt=self.prompts[name])
        ids = request.data.fields["prompt_token_ids"]
        if any(one >= VOCABULARY for one in ids):
            return InvalidRequestError("an id of the prompt is none of the vocabulary")
        grammar = int(request.params.structured.regex) if request.params.structured else None
        return _data(prompt=PreparedPrompt(token_ids=list(ids)), grammar=grammar)

    def _step(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plan)
        if self.fail_steps or (self.fail_if is not None and self.fail_if(plan)):
            self._waiting = []
            raise self.fail_steps.pop(0) if self.fail_steps else RuntimeError("a row is poison")
        kinds = [row.decodes for row in plan.rows]
        assert kinds == sorted(kinds, reverse=True), "decode rows come first"
        outcome = StepOutcome(number=plan.number)
        for row in plan.rows:
            self._run(row, outcome)
        return outcome

    def _run(self, row: StepRow, outcome: StepOutcome) -> None:
        key = row.identity.key
        if row.begin is not None:
            self.rows[key] = _Row(list(row.begin.prompt.token_ids), [])
            assert len(self.rows) <= self.max_num_seqs, "more sequences than device rows"
        state = self.rows[key]
        if row.restart is not None:
            state.tokens, state.last_token = list(row.restart), None
        if row.blocks is not None:
            state.blocks = list(row.blocks)
        assert 0 not in state.blocks, "the spare block was allocated"
        state.received += len(row.appended)
        if row.decodes:
            assert state.last_token is not None
            assert row.start == len(state.tokens)
            state.tokens.append(state.last_token)
        end = row.start + row.count
        assert end <= len(state.blocks) * self.block_size
        for position in range(row.start, end):
            block, offset = divmod(position, self.block_size)
            self.cells[state.blocks[block], offset] = state.tokens[position]
        if not row.samples:
            return
        assert end == len(state.tokens), "a sample is from the last position"
        token = self._sample(row, state)
        state.last_token = token
        outcome.tokens[key] = token
        outcome.logprobs[key] = TokenLogprobs(-0.5, 1, [(token, -0.5), (EOS, -2.0)])
        if row.wants_payload:
            payload = np.asarray([[state.tokens[-1]]], dtype=np.int64)
            self.late.append((row.identity, _data({"fed": payload}, made=end)))

    def _sample(self, row: StepRow, state: _Row) -> int:
        forced = self.forced.get(row.identity.request_id)
        context = self.cells[state.blocks].reshape(-1)[: len(state.tokens)]
        assert context.tolist() == state.tokens, "the cache does not hold this sequence"
        if forced is not None:
            return forced[len(state.tokens) - len(self.prompt_of(row))]
        return next_token(context.tolist(), row.bitmask)

    def prompt_of(self, row: StepRow) -> list[int]:
        for plan in self.plans:
            for one in plan.rows:
                if one.identity == row.identity and one.begin is not None:
                    return one.begin.prompt.token_ids
        raise AssertionError(f"{row.identity} was never begun")


def _data(tensors: dict[str, Any] | None = None, **fields: Any) -> StageData:
    return StageData(modality=Modality.TOKENS, fields=fields, tensors=tensors or {})
