"""A request that has been admitted to step mode."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from omnistage.contracts.identity import RequestKey
from omnistage.diffusion.queue import QueuedRequest

ENCODE, STEP, PREVIEW, DECODE = "encode", "step", "preview", "decode"
KINDS = {ENCODE: "encode", STEP: "step", PREVIEW: "decode", DECODE: "decode"}
"""Which deadline each command has."""


class Phase(Enum):
    ENCODE = ENCODE
    DENOISE = STEP
    DECODE = DECODE
    DELIVER = "deliver"


@dataclass(slots=True)
class ActiveRequest:
    """`batch_key` and `cost` (numbers that one of its steps computes) are the executor's answer to
    its encoding; `work_before` what the device had computed, in the same unit, when it was
    admitted; `alone` after a batch with it has failed; `previews` the numbers of steps after which
    one is due; `num_in_flight` outputs that the executor is still finishing."""

    entry: QueuedRequest
    work_before: int = 0
    phase: Phase = Phase.ENCODE
    batch_key: Hashable = None
    cost: int = 1
    step: int = 0
    total_steps: int = 0
    previews: list[int] = field(default_factory=list)
    num_previewed: int = 0
    num_in_flight: int = 0
    alone: bool = False

    @property
    def key(self) -> RequestKey:
        return self.entry.key

    @property
    def order(self) -> tuple[int, int]:
        return self.entry.order

    @property
    def work(self) -> int:
        """What all its steps compute."""
        return self.total_steps * self.cost

    def can_emit(self, outputs: int) -> bool:
        """Whether its credits allow so many more than those that are on their way."""
        credits = self.entry.credits
        return credits is None or credits - self.num_in_flight >= outputs

    @property
    def preview_is_due(self) -> bool:
        """A preview never takes the last credit: that one is for the result."""
        reached = bool(self.previews) and self.step >= self.previews[0]
        return self.phase is Phase.DENOISE and reached and self.can_emit(2)

    @property
    def decode_is_due(self) -> bool:
        return self.phase is Phase.DECODE and self.can_emit(1)

    @property
    def holds_place(self) -> bool:
        """Not one that is on its way out, or only waits for its reader."""
        if self.phase is Phase.DECODE:
            return self.decode_is_due
        return self.phase is not Phase.DELIVER

    def begin(self, batch_key: Hashable, cost: int, total_steps: int) -> None:
        """It has been encoded."""
        self.batch_key, self.cost, self.total_steps = batch_key, cost, total_steps
        self.previews = preview_steps(self.entry.params.partial_images or 0, total_steps)
        self.phase = Phase.DENOISE

    def moved_to(self, step: int) -> None:
        self.step = step
        if step >= self.total_steps:
            self.phase = Phase.DECODE

    def previewed(self) -> None:
        """One preview stands for all that were due: they would show the same picture."""
        self.previews = [step for step in self.previews if step > self.step]
        self.num_previewed += 1

    def wants_clean_after_next_step(self) -> bool:
        return bool(self.previews) and self.step + 1 >= self.previews[0]


def preview_steps(count: int, total_steps: int) -> list[int]:
    """After how many steps each of `count` previews is due: evenly spread, each before the end;
    fewer where there are too few steps."""
    spread = {round(total_steps * (i + 1) / (count + 1)) for i in range(count)}
    return sorted(step for step in spread if 0 < step < total_steps)
