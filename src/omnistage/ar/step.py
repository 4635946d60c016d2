"""What the token scheduler tells its executor, and what it hears back.

Commands: "describe" (the first one, once): answered with fields "tokenizer" (or None),
"eos_token_ids" (frozenset[int]), "vocab_size", "num_blocks" (block 0, the spare one, included),
"block_size", "max_model_len" and "lag" (0 or 1); "prepare" (fields: "requests", a list of
`StageRequest`), answered later, one outcome a request, with field "prompt": a `PreparedPrompt`, and
"grammar": the compiled one where the parameters ask for structured output; "encode" (fields:
"identity", "prompt"): run the encoders for one request's media; "step" (fields: "plan", a
`StepPlan`); "collect": wait for what is still in flight, if anything is. "step" and "collect"
return field "outcomes", a list of `StepOutcome`, oldest first: an executor with `lag` 1 returns the
outcome of the step before, so that a device always has work. After one of them has raised, nothing
is in flight and what was has no outcome.

A row that `wants_payload` has exactly one late outcome (`finish_later`), in order of its sequence's
rows, also when its token turns out to be beyond the end. Tensors of the same name are joined along
dimension 0 where several rows leave as one emission.
These objects stay in one process: the token runtime runs on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omnistage.ar.prompt import PreparedPrompt
from omnistage.contracts.errors import OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniTokenSamplingParams

if TYPE_CHECKING:
    import numpy as np

DESCRIBE, PREPARE, ENCODE, STEP, COLLECT = "describe", "prepare", "encode", "step", "collect"


@dataclass(slots=True, kw_only=True)
class SequenceStart:
    """Comes with the first row of a sequence. `seed` is set: the scheduler draws one where the
    request names none."""

    prompt: PreparedPrompt
    params: OmniTokenSamplingParams
    seed: int


@dataclass(slots=True, kw_only=True)
class StepRow:
    """One sequence's part of a step: positions `start` … `start + count - 1`.

    Everything before `start` is in the cache. `blocks` is the whole block table when it changed
    since this sequence's last row, else None. `samples`: the last position's logits are sampled.
    `decodes`: the one position is fed with the token that this sequence sampled last, which may
    still be on the device only. After a preemption a sequence starts over at the first position
    that is not cached, in the same device row: its next row has `restart`, all its tokens so far
    (prompt and generated), and nothing of it is in flight then. `appended` is streamed input that
    arrived since the last row, `input_complete` says that it was the last. `bitmask` (int32, one
    bit a token of the vocabulary, set = allowed) constrains this sample. `wants_payload`: what
    later stages need of this row is built and delivered.
    """

    identity: RequestIdentity
    start: int
    count: int
    samples: bool
    decodes: bool
    blocks: list[int] | None = None
    begin: SequenceStart | None = None
    restart: list[int] | None = None
    appended: tuple[StageData, ...] = ()
    input_complete: bool = True
    bitmask: np.ndarray | None = None
    wants_payload: bool = False


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """Rows that decode come first. `number` counts the steps of this replica from 0."""

    number: int
    rows: list[StepRow]

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(slots=True)
class TokenLogprobs:
    """Of one sampled token: its own natural-log probability, its rank (1 = most likely), and the
    `params.logprobs` most likely ones as (token id, logprob), most likely first. All are of the
    distribution before temperature, penalties and filters, as OpenAI reports them."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """Of plan `number`: the tokens sampled; `errors` holds rows that failed by themselves (logits
    that are no numbers), which have no token."""

    number: int
    tokens: dict[RequestKey, int] = field(default_factory=dict)
    logprobs: dict[RequestKey, TokenLogprobs] = field(default_factory=dict)
    errors: dict[RequestKey, OmniError] = field(default_factory=dict)
