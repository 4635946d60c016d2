"""Which sequences compute what in the next step, and which blocks hold it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from omnistage.ar.blocks import BlockPool
from omnistage.ar.options import TokenOptions
from omnistage.ar.sequence import Phase, TokenSequence
from omnistage.ar.step import SequenceStart, StepPlan, StepRow

MAX_PENDING_TOKENS = 256
"""A sequence that nobody reads (no credits) decodes this far ahead, then pauses."""
MAX_PENDING_PAYLOADS = 64


@dataclass(frozen=True, slots=True)
class PlannedRow:
    sequence: TokenSequence
    incarnation: int
    end: int
    samples: bool
    wants_payload: bool


@dataclass(frozen=True, slots=True)
class PlannedStep:
    number: int
    rows: list[PlannedRow]


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens of each prompt in the next step, best first. One that would take all leaves half to
    those behind it; what they do not need is its own again."""
    shares: list[int] = []
    left = budget
    for index, wanted in enumerate(remaining):
        is_last = index == len(remaining) - 1
        share = min(wanted, left if is_last else max(1, left // 2))
        shares.append(min(share, left))
        left -= shares[-1]
    for index, wanted in enumerate(remaining):
        more = min(wanted - shares[index], left)
        shares[index] += more
        left -= more
    return shares


def first_come(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens of each prompt in the next step: all of it, as far as the budget goes."""
    shares: list[int] = []
    for wanted in remaining:
        shares.append(min(wanted, budget - sum(shares)))
    return shares


@dataclass(slots=True)
class StepPlanner:
    """Holds the running sequences, those that wait for a place, and the steps in flight.

    Better ones (`TokenSequence.order`) go first everywhere, and nobody waits for a worse one: a
    sequence is preempted only for a better one, so the best one always gets on.
    """

    options: TokenOptions
    pool: BlockPool
    running: list[TokenSequence] = field(default_factory=list)
    waiting: list[TokenSequence] = field(default_factory=list)
    in_flight: deque[PlannedStep] = field(default_factory=deque)
    preemptions: int = 0
    budget: int = 0
    """Tokens of one step; less than the option after a step ran out of memory."""
    _number: int = 0
    _reserved: int = 0
    """Tokens of the next step that a whole prompt waits for."""
    _held: int = 0
    """Sequences for which the executor keeps a device row."""

    def __post_init__(self) -> None:
        self.budget = self.options.max_num_batched_tokens

    # membership -------------------------------------------------------------------------------

    def enter(self, sequence: TokenSequence) -> None:
        """A prepared sequence, or one that was preempted, waits for its turn."""
        sequence.phase = Phase.WAITING
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda one: one.order)

    def stop(self, sequence: TokenSequence) -> None:
        """It computes nothing any more: its blocks go as soon as nothing in flight uses them."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        sequence.phase = Phase.FINISHED
        self._give_up_blocks(sequence)

    def leave(self, sequence: TokenSequence) -> None:
        """It is gone: the executor forgets it."""
        self.stop(sequence)
        if sequence.begun:
            sequence.begun = False
            self._held -= 1

    def preempt(self, sequence: TokenSequence) -> None:
        """It starts over later, with all tokens it has; it keeps its device row."""
        self.running.remove(sequence)
        self._give_up_blocks(sequence)
        sequence.incarnation += 1
        sequence.num_computed = sequence.num_collected = 0
        sequence.sampled = False
        self.preemptions += 1
        self.enter(sequence)

    def shrink_budget(self) -> bool:
        """Smaller steps from now on; False when they are as small as they get."""
        if self.budget <= self.options.max_num_seqs:
            return False
        self.budget = max(self.options.max_num_seqs, self.budget // 2)
        return True

    def start_over(self, sequence: TokenSequence) -> None:
        """After a failed step: the executor begins it anew."""
        if sequence.phase is Phase.RUNNING:
            self.preempt(sequence)
        if sequence.begun:
            sequence.begun = False
            self._held -= 1

    def to_encode(self) -> TokenSequence | None:
        """The sequence that is next, if its media must be encoded before it can start."""
        head = self._next_waiting()
        if head is None or head.encoded or head.in_flight or not self._has_place(head):
            return None
        assert head.prompt is not None
        last = max((span[1] for item in head.prompt.media for span in item.spans), default=0)
        return head if last > len(self._match(head)) * self.pool.block_size else None

    # planning ---------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        suspect = self._suspect()
        if suspect is not None:
            rows = self._rows_of_suspect(suspect)
        else:
            rows = self._decode_rows(self.budget - self._reserved)
            rows += self._prefill_rows(self.budget - len(rows))
        if not rows:
            return None
        step = PlannedStep(self._number, [row for row, _ in rows])
        self._number += 1
        self.in_flight.append(step)
        return StepPlan(number=step.number, rows=[row for _, row in rows])

    def _decode_rows(self, limit: int) -> list[tuple[PlannedRow, StepRow]]:
        rows: list[tuple[PlannedRow, StepRow]] = []
        for one in sorted(self.running, key=lambda one: one.order):
            if len(rows) >= limit:
                break
            # One that was preempted for a better one meanwhile is not running any more.
            if one.phase is Phase.RUNNING and one.may_decode(self._ahead) and self._room_for(one):
                rows.append(self._row(one, 1))
        return rows

    @property
    def _ahead(self) -> int:
        return MAX_PENDING_PAYLOADS if self.options.emits_payload else MAX_PENDING_TOKENS

    def _prefill_rows(self, budget: int) -> list[tuple[PlannedRow, StepRow]]:
        prefilling = [one for one in self.running if one.is_prefilling]
        prefilling += self._admit(budget, prefilling)
        prefilling.sort(key=lambda one: one.order)
        wanted = [one.num_to_compute for one in prefilling]
        if self.options.enable_chunked_prefill:
            shares = share_budget(wanted, budget)
        else:
            shares = first_come(wanted, budget)
        return [
            self._row(one, count) for one, count in zip(prefilling, shares, strict=True) if count
        ]

    def _suspect(self) -> TokenSequence | None:
        """The best of those that have to show, one at a time, that they do not make steps fail."""
        alone = [one for one in (*self.running, *self.waiting) if one.alone]
        return min(alone, key=lambda one: one.order) if alone else None

    def _rows_of_suspect(self, sequence: TokenSequence) -> list[tuple[PlannedRow, StepRow]]:
        if sequence.phase is Phase.WAITING:
            if self.in_flight:
                return []
            while not self._start(sequence, self._match(sequence), headroom=0):
                self.preempt(max(self.running, key=lambda one: one.order))
        if sequence.is_prefilling:
            return [self._row(sequence, min(sequence.num_to_compute, self.budget))]
        return []  # Its outcome decides.

    def _room_for(self, sequence: TokenSequence) -> bool:
        """Make sure that the next position has a block; preempts worse ones for it."""
        if sequence.num_computed < len(sequence.blocks) * self.pool.block_size:
            return True
        while not self.pool.num_available:
            if any(one.leaving_blocks for one in self._all_in_flight()):
                return False  # They come back when the step that uses them is collected.
            worst = max(self.running, key=lambda one: one.order)
            self.preempt(worst)
            if worst is sequence:
                return False
        last = sequence.blocks[-1] if sequence.blocks else None
        sequence.blocks += self.pool.allocate(1, after=last)
        sequence.blocks_told = False
        return True

    def _all_in_flight(self) -> list[TokenSequence]:
        return [row.sequence for step in self.in_flight for row in step.rows]

    def _row(self, sequence: TokenSequence, count: int) -> tuple[PlannedRow, StepRow]:
        assert sequence.prompt is not None
        start, end = sequence.num_computed, sequence.num_computed + count
        decodes = sequence.sampled
        samples = end == sequence.num_tokens
        wants_payload = samples and sequence.output.with_payload
        row = StepRow(
            identity=sequence.identity,
            start=start,
            count=count,
            samples=samples,
            decodes=decodes,
            blocks=None if sequence.blocks_told else list(sequence.blocks),
            appended=tuple(sequence.new_input),
            input_complete=sequence.input_complete,
            bitmask=sequence.grammar.bitmask() if samples and sequence.grammar else None,
            wants_payload=wants_payload,
        )
        if sequence.incarnation and sequence.told_incarnation != sequence.incarnation:
            row.restart = list(sequence.token_ids)
        if not sequence.begun:
            row.begin = SequenceStart(
                prompt=sequence.prompt, params=sequence.params, seed=sequence.seed
            )
            sequence.begun = True
            self._held += 1
        sequence.told_incarnation = sequence.incarnation
        sequence.streamed |= bool(sequence.new_input)
        sequence.new_input = []
        sequence.blocks_told = True
        sequence.num_computed = end
        sequence.in_flight += 1
        if samples:
            sequence.in_flight_samples += 1
            sequence.sampled = True
        return PlannedRow(sequence, sequence.incarnation, end, samples, wants_payload), row

    # admission --------------------------------------------------------------------------------

    def _admit(self, budget: int, prefilling: list[TokenSequence]) -> list[TokenSequence]:
        """Give places and blocks to those that wait, best first, while there is budget for them.
        Nobody overtakes a sequence that does not fit yet."""
        admitted: list[TokenSequence] = []
        wanted = sum(one.num_to_compute for one in prefilling)
        self._reserved = 0
        while (head := self._next_waiting()) is not None:
            if head.in_flight or self.to_encode() is not None or wanted >= 2 * budget:
                break
            matched = self._match(head)
            size = len(head.token_ids) - len(matched) * self.pool.block_size
            if self._must_wait_whole(size, wanted, budget):
                break
            if not self._start(head, matched, headroom=len(self.running)):
                break
            admitted.append(head)
            wanted += size
        return admitted

    def _must_wait_whole(self, size: int, wanted: int, budget: int) -> bool:
        """Without chunks a prompt is computed whole or waits. One that does not fit beside those
        that decode comes before them in the next step; one that never fits, which is one that has
        grown before it was preempted, goes in parts after all."""
        if self.options.enable_chunked_prefill or wanted + size <= budget:
            return False
        if not wanted and size <= self.budget:
            self._reserved = size
        return bool(wanted) or size <= self.budget

    def _next_waiting(self) -> TokenSequence | None:
        """The best one; when it needs a place and there is none, the best one that has its own."""
        for one in self.waiting:
            if self._has_place(one):
                return one
        return None

    def _has_place(self, sequence: TokenSequence) -> bool:
        return sequence.begun or self._held + self._unbegun() < self.options.max_num_seqs

    def _unbegun(self) -> int:
        return sum(not one.begun for one in self.running)

    def _match(self, sequence: TokenSequence) -> list[int]:
        """Cached blocks that it can start from; the last token is always computed."""
        if sequence.hasher is None:
            return []
        usable = (len(sequence.token_ids) - 1) // self.pool.block_size
        return self.pool.match(sequence.hasher.upto(sequence.token_ids, usable))

    def _start(self, sequence: TokenSequence, matched: list[int], *, headroom: int) -> bool:
        """All blocks of its tokens at once, so that they lie together. `headroom` blocks have to
        stay available: those that run may each need one soon."""
        size = self.pool.block_size
        missing = -(-len(sequence.token_ids) // size) - len(matched)
        spare = self.pool.num_available - self.pool.num_unused(matched) - missing
        if spare < headroom:
            return False
        if sequence.hasher is not None:
            self.pool.take(matched, queries=(len(sequence.token_ids) - 1) // size)
        sequence.blocks = matched + self.pool.allocate(
            missing, after=matched[-1] if matched else None
        )
        sequence.blocks_told = False
        sequence.num_computed = sequence.num_collected = len(matched) * size
        if not sequence.incarnation:
            sequence.cached_tokens = sequence.num_computed
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.phase = Phase.RUNNING
        return True

    # what came back ---------------------------------------------------------------------------

    def collect(self, number: int) -> PlannedStep:
        """The oldest step in flight has its outcome: what it wrote is there."""
        step = self.in_flight.popleft()
        assert step.number == number, f"outcome of step {number}, expected {step.number}"
        for row in step.rows:
            self._landed(row)
        return step

    def drop_in_flight(self) -> list[TokenSequence]:
        """Steps in flight have failed: nothing of them comes. Returns whom they were about."""
        found: dict[int, TokenSequence] = {}
        while self.in_flight:
            for row in self.in_flight.popleft().rows:
                one = row.sequence
                found[id(one)] = one
                one.in_flight = one.in_flight_samples = 0
                self.pool.free(one.leaving_blocks)
                one.leaving_blocks = []
        return list(found.values())

    def _landed(self, row: PlannedRow) -> None:
        sequence = row.sequence
        sequence.in_flight -= 1
        sequence.in_flight_samples -= row.samples
        if row.incarnation == sequence.incarnation and sequence.phase is Phase.RUNNING:
            sequence.num_collected = row.end
            self._remember(sequence)
        if not sequence.in_flight and sequence.leaving_blocks:
            self.pool.free(sequence.leaving_blocks)
            sequence.leaving_blocks = []

    def _remember(self, sequence: TokenSequence) -> None:
        if sequence.hasher is None:
            return
        full = sequence.num_collected // self.pool.block_size
        if full > sequence.num_remembered:
            hashes = sequence.hasher.upto(sequence.token_ids, full)
            for index in range(sequence.num_remembered, full):
                self.pool.remember(sequence.blocks[index], hashes[index])
            sequence.num_remembered = full

    def _give_up_blocks(self, sequence: TokenSequence) -> None:
        blocks, sequence.blocks = sequence.blocks, []
        sequence.num_remembered = 0
        if sequence.in_flight:
            sequence.leaving_blocks += blocks
        else:
            self.pool.free(blocks)
