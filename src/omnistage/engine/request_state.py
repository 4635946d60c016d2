"""What the orchestrator knows of one request: its children, where each is, what is unpaid."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omnistage.contracts.errors import OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import Output
from omnistage.contracts.outputs import FinishReason
from omnistage.contracts.payloads import PayloadRef, StageData
from omnistage.contracts.requests import OmniRequest
from omnistage.engine.output_meter import OutputMeter
from omnistage.engine.streams import OutputStream


class Phase(StrEnum):
    """`ACTIVE` → one of the others, never back. `ENDED`: the caller has its terminal event, some
    stage has not yet said that it holds nothing more."""

    ACTIVE = "active"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class Delivery:
    """A payload waiting for a replica of its stage."""

    stage_id: int
    source_stage_id: int | None
    sequence: int
    payload: PayloadRef
    frames: tuple[Any, ...]
    last: bool
    epoch: int = 0


@dataclass(slots=True, kw_only=True)
class UnpaidOutput:
    """An output that `takers` have not taken yet."""

    takers: int
    tx_s: float
    routed_at: float
    """When it was passed on, in monotonic seconds."""


@dataclass(slots=True, kw_only=True)
class StageVisit:
    """One child at one stage."""

    submitted: bool = False
    open_sources: set[int]
    """Input sources that have not sent their last payload."""
    next_output: int = 0
    output_final: bool = False
    unpaid: dict[int, UnpaidOutput] = field(default_factory=dict)
    """By output sequence."""
    started_at: float = field(default_factory=time.monotonic)
    joined: dict[int, list[tuple[Child, int]]] = field(default_factory=dict)
    """Source stage → the (child, output sequence) pairs that its joined input was made of."""

    @property
    def is_paid(self) -> bool:
        return self.output_final and not self.unpaid


@dataclass(slots=True, kw_only=True)
class Child:
    """One child of a request. `prefer` is the sibling whose replica it should share."""

    identity: RequestIdentity
    inputs: StageData
    prefer: RequestKey | None = None
    group: int = 0
    visits: dict[int, StageVisit] = field(default_factory=dict)
    waiting: list[Delivery] = field(default_factory=list)
    entry_handles: dict[tuple[int, int], str] = field(default_factory=dict)
    """(entry stage, input sequence) → what the engine holds in shared memory for it."""
    meter: OutputMeter = field(default_factory=lambda: OutputMeter(time.monotonic()))

    @property
    def key(self) -> RequestKey:
        return self.identity.key


@dataclass(slots=True, kw_only=True)
class RequestState:
    request: OmniRequest
    stream: OutputStream
    children: dict[int, Child]
    needed: frozenset[int]
    """The stages that this request's outputs depend on."""
    created_at: float = field(default_factory=time.monotonic)
    phase: Phase = Phase.ACTIVE
    error: OmniError | None = None
    finish_reason: FinishReason = FinishReason.STOP
    """The newest that a final output brought."""
    stage_durations: dict[str, float] = field(default_factory=dict)
    pending_aborts: set[tuple[RequestKey, int]] = field(default_factory=set)
    """(child, stage) that were told to stop and have not answered."""
    joins: dict[tuple[int, int, int], dict[str, tuple[Child, Output, tuple[Any, ...]]]] = field(
        default_factory=dict
    )
    """(stage, source, group) → role → (child, output, frames), held until all roles are here."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    slow_timer: asyncio.TimerHandle | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    unconfirmed: bool = False
    """It was released although some stage never confirmed its abort."""
    next_input: int = 0
    unread_inputs: dict[int, int] = field(default_factory=dict)
    """Input sequence → how many stages of how many children have not copied it in."""
    input_credits: asyncio.Semaphore | None = None

    @property
    def request_id(self) -> str:
        return self.request.identity.request_id

    @property
    def active(self) -> bool:
        return self.phase is Phase.ACTIVE

    def roles(self, group: int) -> int:
        """How many children, the main one included, form this group."""
        return sum(child.group == group for child in self.children.values())

    def is_complete(self) -> bool:
        """Every needed output of every child has been made."""
        return all(self._is_done(child) for child in self.children.values())

    def _is_done(self, child: Child) -> bool:
        if child.identity.role == "main" and not self.needed <= child.visits.keys():
            return False
        return bool(child.visits) and all(v.output_final for v in child.visits.values())

    def return_input_credit(self) -> None:
        """Whoever waits to append may go on, or learn that the request is over."""
        if self.input_credits is not None:
            self.input_credits.release()

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        if self.slow_timer is not None:
            self.slow_timer.cancel()
            self.slow_timer = None
