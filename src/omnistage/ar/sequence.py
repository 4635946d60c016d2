"""One child of a request at a token stage, from its arrival to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from omnistage.ar.block_hash import BlockHasher
from omnistage.ar.emission import OutputBuffer
from omnistage.ar.prompt import PreparedPrompt
from omnistage.ar.step import StepRow
from omnistage.ar.stopping import Ending, OutputText
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import OmniTokenSamplingParams

if TYPE_CHECKING:
    import numpy as np


class Phase(Enum):
    INPUT = auto()
    """Waits for input, or for its turn to be prepared."""
    PREPARING = auto()
    WAITING = auto()
    """Prepared; waits for a place and blocks, for the first time or after a preemption."""
    RUNNING = auto()
    FINISHED = auto()
    """Computes nothing any more; something of it may still have to leave."""


@dataclass(slots=True, eq=False)
class TokenSequence:
    """`token_ids` are the prompt's and all generated ones known on the host; `num_computed` counts
    positions whose keys and values are written or in flight, `num_collected` those known written.
    `in_flight` rows of it have no outcome yet, `in_flight_samples` of those bring a token.
    `incarnation` counts preemptions. `received` counts token ids of streamed input.
    """

    identity: RequestIdentity
    params: OmniTokenSamplingParams
    seed: int
    arrival: int
    first_input: StageData
    input_complete: bool
    feeds: bool
    output: OutputBuffer
    key: RequestKey = field(init=False)
    order: tuple[int, int] = field(init=False)
    """Best first: priority, then arrival."""
    credits: int | None = None
    phase: Phase = Phase.INPUT
    epoch: int = 0
    new_input: list[StageData] = field(default_factory=list)
    received: int = 0

    prompt: PreparedPrompt | None = None
    text: OutputText | None = None
    grammar: Any = None
    bitmask: np.ndarray | None = None
    """What its grammar allows next."""
    hasher: BlockHasher | None = None
    num_prompt: int = 0
    max_output: int = 0
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    encoded: bool = False

    placed: bool = False
    begun: bool = False
    """The executor knows it."""
    streamed: bool = False
    alone: bool = False
    incarnation: int = 0
    told_incarnation: int = 0
    sampled: bool = False
    """In this incarnation: its next step is a decode step."""
    blocks: list[int] = field(default_factory=list)
    blocks_told: bool = False
    leaving_blocks: list[int] = field(default_factory=list)
    """Given up, but steps in flight may still write there."""
    num_computed: int = 0
    num_collected: int = 0
    num_remembered: int = 0
    in_flight: int = 0
    in_flight_samples: int = 0
    ending: Ending | None = None

    arrived_s: float = field(default_factory=time.monotonic)
    began_s: float | None = None
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.key = self.identity.key
        self.order = (-self.identity.priority, self.arrival)

    @property
    def num_sampled(self) -> int:
        """Tokens generated, in flight included."""
        return len(self.token_ids) - self.num_prompt + self.in_flight_samples

    @property
    def num_tokens(self) -> int:
        """Length once all that is in flight has come."""
        return len(self.token_ids) + self.in_flight_samples

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_irreproducible(self) -> bool:
        """It cannot start over at an executor that has forgotten it: streamed input is not kept,
        and payloads would be built twice."""
        return self.streamed or (self.output.with_payload and self.num_sampled > 0)

    @property
    def is_prefilling(self) -> bool:
        return not self.sampled and self.num_to_compute > 0

    def timings_s(self) -> dict[str, float]:
        """Seconds until its first step ("queue", preparing included), from there to its first token
        ("prefill"), and since ("decode")."""
        marks = [self.arrived_s, self.began_s, self.first_token_s, time.monotonic()]
        names = ("queue", "prefill", "decode")
        return {
            name: later - earlier
            for name, earlier, later in zip(names, marks, marks[1:], strict=False)
            if earlier is not None and later is not None
        }

    def was_planned(self, row: StepRow) -> None:
        """`row` is in a step now: what it says need not be said again."""
        self.begun = self.blocks_told = True
        if self.began_s is None:
            self.began_s = time.monotonic()
        self.told_incarnation = self.incarnation
        self.streamed |= bool(row.appended)
        self.new_input = []
        self.num_computed += row.count
        self.in_flight += 1
        if row.samples:
            self.in_flight_samples += 1
            self.sampled = True

    def may_decode(self, max_pending: int) -> bool:
        """Whether a decode step may be planned now."""
        count = self.num_sampled
        if not self.sampled or count >= self.max_output:
            return False
        if self.grammar is not None and self.in_flight_samples:
            return False
        if self.credits == 0 and self.output.num_pending + self.in_flight_samples >= max_pending:
            return False
        return self._has_input_for(count - 1)

    def _has_input_for(self, step: int) -> bool:
        """Decode step `step` consumes one more id of streamed input than the one before."""
        assert self.prompt is not None
        offset = self.prompt.conditioning_offset
        return offset is None or self.input_complete or self.received >= step + offset
