"""One sequence's part of a step: what the executor is told, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.ar.sequence import TokenSequence
from omnistage.ar.step import SequenceStart, StepRow


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """`incarnation` is the sequence's when the row was planned, `end` the position behind it."""

    sequence: TokenSequence
    incarnation: int
    end: int
    samples: bool
    wants_payload: bool


@dataclass(frozen=True, slots=True)
class PlannedStep:
    number: int
    rows: list[PlannedRow]


Rows = list[tuple[PlannedRow, StepRow]]


def plan_row(sequence: TokenSequence, count: int) -> tuple[PlannedRow, StepRow]:
    """Plan `count` more positions of it. Says what the executor does not know yet."""
    assert sequence.prompt is not None
    end = sequence.num_computed + count
    samples = end == sequence.num_tokens
    row = StepRow(
        identity=sequence.identity,
        start=sequence.num_computed,
        count=count,
        samples=samples,
        decodes=sequence.sampled,
        blocks=None if sequence.blocks_told else list(sequence.blocks),
        appended=tuple(sequence.new_input),
        input_complete=sequence.input_complete,
        bitmask=sequence.bitmask if samples else None,
        wants_payload=samples and sequence.output.with_payload,
    )
    if not sequence.begun:
        row.begin = SequenceStart(
            prompt=sequence.prompt, params=sequence.params, seed=sequence.seed
        )
    if sequence.told_incarnation != sequence.incarnation:
        row.restart = list(sequence.token_ids)
    sequence.was_planned(row)
    return PlannedRow(sequence, sequence.incarnation, end, samples, row.wants_payload), row
