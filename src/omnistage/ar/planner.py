"""Which sequences compute what in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from omnistage.ar.blocks import BlockPool
from omnistage.ar.budget import first_come, has_share_left, share_budget
from omnistage.ar.options import TokenOptions
from omnistage.ar.places import Places
from omnistage.ar.rows import PlannedStep, Rows, plan_row
from omnistage.ar.sequence import Phase, TokenSequence
from omnistage.ar.sequence_blocks import SequenceBlocks
from omnistage.ar.step import StepPlan
from omnistage.contracts.errors import OmniError, OutOfMemoryError
from omnistage.contracts.identity import RequestKey
from omnistage.observability.logging import get_logger

logger = get_logger(__name__)

MAX_PENDING_TOKENS = 256
"""A sequence that nobody reads (no credits) decodes this far ahead, then pauses."""
MAX_PENDING_PAYLOADS = 64


@dataclass(slots=True)
class StepPlanner:
    """Sequences that wait for a place or run, and the steps in flight.

    Better ones (`TokenSequence.order`) go first everywhere, and nobody waits for a worse one: a
    sequence is preempted only for a better one, so the best one always gets on.
    """

    options: TokenOptions
    pool: BlockPool
    in_flight: deque[PlannedStep] = field(default_factory=deque)
    preemptions: int = 0
    places: Places = field(init=False)
    _blocks: SequenceBlocks = field(init=False)
    _budget: int = field(init=False)
    """Tokens of one step; fewer than the option's after a step ran out of memory."""
    _reserved: int = 0
    """Of the next step's budget: for a whole prompt that did not fit beside the decode steps."""
    _suspects: list[TokenSequence] = field(default_factory=list)
    _number: int = 0

    def __post_init__(self) -> None:
        self.places = Places(self.options.max_num_seqs)
        self._blocks = SequenceBlocks(self.pool)
        self._budget = self.options.max_num_batched_tokens

    # membership -------------------------------------------------------------------------------

    def stop(self, sequence: TokenSequence) -> None:
        """It computes nothing any more: its blocks go as soon as nothing in flight uses them."""
        self.places.withdraw(sequence)
        sequence.phase = Phase.FINISHED
        self._blocks.give_up(sequence)

    def leave(self, sequence: TokenSequence) -> None:
        """It is gone: the executor forgets it."""
        self.stop(sequence)
        self.places.leave(sequence)
        if not self.places.running:
            self._budget = self.options.max_num_batched_tokens

    def preempt(self, sequence: TokenSequence) -> None:
        """It starts over later, with all tokens it has; it keeps its place."""
        self._blocks.give_up(sequence)
        sequence.incarnation += 1
        sequence.sampled = False
        self.places.wait(sequence)
        self.preemptions += 1

    def to_encode(self) -> TokenSequence | None:
        """The sequence that is next, if its media must be encoded before it can start."""
        head = self._suspect() or self.places.next_waiting()
        if head is None or head.phase is not Phase.WAITING or not self._must_encode(head):
            return None
        return head

    def _must_encode(self, sequence: TokenSequence) -> bool:
        """Media of it are neither encoded nor in cached blocks altogether."""
        if sequence.encoded:
            return False
        assert sequence.prompt is not None
        last = max((span[1] for item in sequence.prompt.media for span in item.spans), default=0)
        return last > len(self._blocks.match(sequence)) * self.pool.block_size

    # planning ---------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        suspect = self._suspect()
        if suspect is not None:
            rows = self._rows_of_suspect(suspect)
        else:
            rows = self._decode_rows(self._budget - self._reserved)
            rows += self._prefill_rows(self._budget - len(rows))
        if not rows:
            return None
        step = PlannedStep(self._number, [row for row, _ in rows])
        self._number += 1
        self.in_flight.append(step)
        return StepPlan(number=step.number, rows=[row for _, row in rows])

    def _decode_rows(self, limit: int) -> Rows:
        ahead = MAX_PENDING_PAYLOADS if self.options.emits_payload else MAX_PENDING_TOKENS
        rows: Rows = []
        for one in list(self.places.running):
            if len(rows) >= limit:
                break
            # One that was preempted for a better one meanwhile is not running any more.
            if one.phase is Phase.RUNNING and one.may_decode(ahead) and self._room_for(one):
                rows.append(plan_row(one, 1))
        return rows

    def _room_for(self, sequence: TokenSequence) -> bool:
        """Make sure that the next position has a block; preempts worse ones for it."""
        if self._blocks.has_room(sequence):
            return True
        while not self.pool.num_available:
            if any(row.sequence.leaving_blocks for step in self.in_flight for row in step.rows):
                return False  # They come back when the step that uses them is collected.
            worst = self.places.running[-1]
            self.preempt(worst)
            if worst is sequence:
                return False
        self._blocks.grow(sequence)
        return True

    def _prefill_rows(self, budget: int) -> Rows:
        prefilling = [one for one in self.places.running if one.is_prefilling]
        prefilling += self._admit(budget, [one.num_to_compute for one in prefilling])
        prefilling.sort(key=lambda one: one.order)
        wanted = [one.num_to_compute for one in prefilling]
        share = share_budget if self.options.enable_chunked_prefill else first_come
        shares = zip(prefilling, share(wanted, budget), strict=True)
        return [plan_row(one, count) for one, count in shares if count]

    def _admit(self, budget: int, sizes: list[int]) -> list[TokenSequence]:
        """Give places and blocks to those that wait, best first, while there is budget for them
        beside prompts of which `sizes` tokens are left. Nobody overtakes one that does not fit;
        those whose blocks are being computed by another are no hindrance."""
        admitted: list[TokenSequence] = []
        past: list[TokenSequence] = []
        self._reserved = 0
        while has_share_left(sizes, budget):
            head = self.places.next_waiting(past)
            if head is None or head.in_flight or self._must_encode(head):
                break
            matched = self._blocks.match(head)
            if self._blocks.is_being_computed(head, len(matched), self.places.running):
                past.append(head)
                continue
            size = len(head.token_ids) - len(matched) * self.pool.block_size
            if self._must_wait_whole(size, sum(sizes), budget):
                break
            if not self._blocks.start(head, matched, headroom=len(self.places.running)):
                break
            self.places.run(head)
            admitted.append(head)
            sizes.append(size)
        return admitted

    def _must_wait_whole(self, size: int, wanted: int, budget: int) -> bool:
        """Without chunks a prompt is computed whole or waits. One that does not fit beside those
        that decode comes before them in the next step; one that never fits, which is one that has
        grown before it was preempted, goes in parts after all."""
        if self.options.enable_chunked_prefill or wanted + size <= budget:
            return False
        if not wanted and size <= self._budget:
            self._reserved = size
        return bool(wanted) or size <= self._budget

    # what came back ---------------------------------------------------------------------------

    def collect(self, number: int, failed: Collection[RequestKey] = ()) -> PlannedStep:
        """The oldest step in flight has its outcome: what it wrote is there, but for rows of
        `failed`, which wrote nothing or nothing of use: nobody is to begin with that."""
        step = self.in_flight.popleft()
        assert step.number == number, f"outcome of step {number}, expected {step.number}"
        for row in step.rows:
            one = row.sequence
            one.in_flight -= 1
            one.in_flight_samples -= row.samples
            written = row.incarnation == one.incarnation and one.key not in failed
            self._blocks.landed(one, row.end, current=written)
        return step

    # failed steps -----------------------------------------------------------------------------

    def recover(self, error: OmniError, *, newest_is_failed: bool) -> list[TokenSequence]:
        """A command failed, and with it all steps in flight. Whoever can starts over; returns those
        that fail. Payloads of the failed step itself are withdrawn, those of steps before it were
        given away: their sequences cannot be computed again unnoticed."""
        steps = self._drop_in_flight()
        whom = {id(row.sequence): row.sequence for step in steps for row in step.rows}
        live = [one for one in whom.values() if one.phase is not Phase.FINISHED]
        sent = steps[:-1] if newest_is_failed else steps
        lost = {id(row.sequence) for step in sent for row in step.rows if row.wants_payload}
        smaller = isinstance(error, OutOfMemoryError) and self._shrink_budget()
        failed: list[TokenSequence] = []
        for one in live:
            if id(one) in lost or one.is_irreproducible or (len(live) == 1 and not smaller):
                failed.append(one)
            else:
                self._start_over(one, alone=not smaller)
        return failed

    def _drop_in_flight(self) -> list[PlannedStep]:
        steps = list(self.in_flight)
        self.in_flight.clear()
        for step in steps:
            for row in step.rows:
                row.sequence.in_flight = row.sequence.in_flight_samples = 0
                self._blocks.give_back(row.sequence)
        return steps

    def _shrink_budget(self) -> bool:
        """Smaller steps as long as anything runs; False when they are as small as they get."""
        least = self.options.max_num_seqs
        if self._budget <= least:
            return False
        self._budget = max(least, self._budget // 2)
        logger.warning("out of memory: steps of at most %d tokens from now on", self._budget)
        return True

    def _start_over(self, sequence: TokenSequence, *, alone: bool) -> None:
        """The executor begins it anew; `alone`: in a step of its own, which shows whether it is
        what makes steps fail."""
        assert sequence.prompt is not None
        if sequence.phase is Phase.RUNNING:
            self.preempt(sequence)
        sequence.begun = False
        sequence.encoded = not sequence.prompt.media
        sequence.alone = alone
        if alone and sequence not in self._suspects:
            self._suspects.append(sequence)

    def _suspect(self) -> TokenSequence | None:
        """The best of those that have to run alone."""
        if self._suspects:
            self._suspects = [
                one for one in self._suspects if one.alone and one.phase is not Phase.FINISHED
            ]
        return min(self._suspects, key=lambda one: one.order, default=None)

    def _rows_of_suspect(self, sequence: TokenSequence) -> Rows:
        if sequence.phase is Phase.WAITING:
            if self.in_flight or self.to_encode() is not None:
                return []
            while not self._blocks.start(sequence, self._blocks.match(sequence), headroom=0):
                self.preempt(self.places.running[-1])
            self.places.run(sequence)
        if not sequence.is_prefilling:
            return []  # Its outcome decides.
        return [plan_row(sequence, min(sequence.num_to_compute, self._budget))]
