"""The token stage's scheduler: continuous batching of requests, step by step.

A request is prepared (template, tokenizer, processor), its media are encoded, its prompt is
computed in chunks beside the decode steps of others, then it decodes until something ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from omnistage.ar import commands
from omnistage.ar.beginning import (
    Beginning,
    MakeDetokenizer,
    MakeGrammar,
    make_detokenizer,
    make_grammar,
)
from omnistage.ar.blocks import BlockPool
from omnistage.ar.description import StageDescription
from omnistage.ar.emission import Piece
from omnistage.ar.intake import TokenIntake
from omnistage.ar.options import TokenOptions
from omnistage.ar.output import TokenOutput
from omnistage.ar.planner import StepPlanner
from omnistage.ar.sequence import Phase, TokenSequence
from omnistage.ar.step import COLLECT, DESCRIBE, ENCODE, PREPARE, STEP, StepOutcome
from omnistage.ar.token_text import TokenBytes, logprob_entry, token_bytes
from omnistage.contracts.errors import (
    InternalError,
    OmniError,
    OverloadedError,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest

_PREPARED_AHEAD = 2
"""Prompts that wait prepared, media and all, in places' worth."""


class TokenScheduler:
    """See `contracts.runtime.Scheduler`. Between `add` and its end a child is in `_sequences`, and
    in one of: `_intake` (input, preparing), `_planner` (waiting, running), or finished with output
    that has not left."""

    def __init__(
        self,
        options: TokenOptions,
        *,
        make_detokenizer: MakeDetokenizer = make_detokenizer,
        make_grammar: MakeGrammar = make_grammar,
        token_bytes: TokenBytes = token_bytes,
    ) -> None:
        self._options = options
        self._token_bytes = token_bytes
        self._beginning = Beginning(options, make_detokenizer, make_grammar)
        self._intake = TokenIntake(options)
        self._sequences: dict[RequestKey, TokenSequence] = {}
        self._first_credits: dict[RequestKey, int] = {}
        self._just_encoded = False
        self._description: StageDescription | None = None
        self._planner: StepPlanner
        self._output: TokenOutput

    # requests ---------------------------------------------------------------------------------

    def add(self, request: StageRequest) -> None:
        """Raises `OverloadedError` when too many wait, `InvalidRequestError` for what the stage
        cannot take, `InternalError` for a child that is here already."""
        key = request.identity.key
        credits = self._first_credits.pop(key, None)
        if key in self._sequences:
            raise InternalError(f"request {request.identity} is already at this stage")
        if self.counts()[1] >= self._options.max_queued_requests:
            raise OverloadedError(
                f"{self._options.max_queued_requests} requests wait for this stage already; retry "
                "later, or raise options.max_queued_requests",
                retry_after_s=1.0,
            )
        self._sequences[key] = self._intake.add(request, credits)

    def append_input(self, identity: RequestIdentity, data: StageData, epoch: int) -> None:
        if (sequence := self._sequences.get(identity.key)) is not None:
            self._intake.append(sequence, data, epoch)

    def end_input(self, identity: RequestIdentity, epoch: int) -> None:
        if (sequence := self._sequences.get(identity.key)) is not None:
            self._intake.end(sequence, epoch)

    def set_credits(self, key: RequestKey, credits: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            self._first_credits[key] = credits
        else:
            sequence.credits = credits

    def abort(self, key: RequestKey) -> None:
        self._first_credits.pop(key, None)
        if (sequence := self._sequences.get(key)) is not None:
            self._drop(sequence)

    def counts(self) -> tuple[int, int]:
        if self._description is None:
            return (0, len(self._intake))
        waiting = len(self._intake) + self._planner.places.num_waiting
        return (len(self._sequences) - waiting, waiting)

    def next_wake_s(self) -> float | None:
        return None

    # commands ---------------------------------------------------------------------------------

    def next_command(self) -> Command | None:
        """The loop of a token stage. Preparing is cheap here (it goes on elsewhere), encoding is
        not: between two encodings those that run take a step."""
        if self._description is None:
            return commands.describe()
        ahead = _PREPARED_AHEAD * self._options.max_num_seqs - self._planner.places.num_waiting
        if chosen := self._intake.to_prepare(ahead):
            return commands.prepare(chosen)
        head = self._planner.to_encode()
        if head is not None and not (self._just_encoded and self._planner.places.running):
            return self._encode(head)
        if (plan := self._planner.plan()) is not None:
            self._just_encoded = False
            rows = self._planner.in_flight[-1].rows
            return commands.step(plan, [row.sequence for row in rows])
        if head is not None:
            return self._encode(head)
        if self._planner.in_flight or self._output.is_due:
            return commands.collect()
        return None

    def _encode(self, sequence: TokenSequence) -> Command:
        self._just_encoded = True
        return commands.encode(sequence)

    # outcomes ---------------------------------------------------------------------------------

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        fields = results[0].fields
        if command.name == DESCRIBE:
            return self._described(StageDescription.of(results[0]))
        if command.name == ENCODE:
            for sequence in self._of(command):
                sequence.encoded = True
        if command.name not in (STEP, COLLECT):
            return ()
        self._output.begin_step()
        failed = [one for outcome in fields["outcomes"] for one in self._collect(outcome)]
        return [*failed, *self._emit()]

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        sequence = self._sequences.get(identity.key)
        if sequence is None:
            return ()
        if isinstance(outcome, OmniError):
            return [self._end(sequence, outcome)]
        if sequence.phase is Phase.PREPARING:
            return self._prepared(sequence, outcome)
        sequence.output.push_payload(outcome)
        self._output.changed(sequence)
        return self._emit()

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        """Preparing or encoding fails its own children. After a failed step all that was in flight
        is computed again: in smaller steps when memory ran out, else each sequence alone once; one
        that fails alone fails."""
        if command.name == DESCRIBE:
            raise error
        if command.name in (PREPARE, ENCODE):
            return [self._end(one, error) for one in self._of(command)]
        failed = self._planner.recover(error, newest_is_failed=command.name == STEP)
        return [self._end(one, error) for one in failed]

    def _described(self, description: StageDescription) -> list[Emission]:
        """From now on there are blocks; who came before is held to the vocabulary as well."""
        self._description = self._beginning.description = description
        pool = BlockPool(description.num_blocks, description.block_size)
        self._planner = StepPlanner(self._options, pool)
        has_text = description.tokenizer is not None
        modality = self._options.output_modality if has_text else Modality.TOKENS
        self._output = TokenOutput(modality, has_text)
        self._intake.vocab_size = description.vocab_size
        self._intake.has_tokenizer = has_text
        refused: list[Emission] = []
        for one in list(self._intake):
            try:
                self._intake.check(one.params)
            except OmniError as error:
                refused.append(self._end(one, error))
        return refused

    def _prepared(self, sequence: TokenSequence, outcome: StageData) -> list[Emission]:
        self._intake.remove(sequence)
        try:
            self._beginning.begin(sequence, outcome.fields["prompt"], outcome.fields.get("grammar"))
        except OmniError as error:
            return [self._end(sequence, error)]
        self._planner.places.wait(sequence)
        return []

    def _collect(self, outcome: StepOutcome) -> Iterator[Emission]:
        """One step's tokens reach their sequences."""
        for row in self._planner.collect(outcome.number, outcome.errors).rows:
            sequence, key = row.sequence, row.sequence.key
            if sequence.phase is Phase.FINISHED:
                continue  # Beyond its end, or it was aborted.
            sequence.alone = False
            if key in outcome.errors:
                yield self._end(sequence, outcome.errors[key])
            elif row.samples:
                try:
                    self._take_token(sequence, outcome.tokens[key], outcome)
                except OmniError as error:  # Its grammar's: too complex, or not kept.
                    yield self._end(sequence, error)

    def _take_token(self, sequence: TokenSequence, token: int, outcome: StepOutcome) -> None:
        assert sequence.text is not None
        assert self._description is not None
        sequence.token_ids.append(token)
        if sequence.first_token_s is None:
            sequence.first_token_s = time.monotonic()
        logprobs = outcome.logprobs.get(sequence.key)
        entry = None
        if logprobs is not None and sequence.params.logprobs is not None:
            tokenizer = self._description.tokenizer
            entry = logprob_entry(tokenizer, token, logprobs, self._token_bytes)
        text, sequence.ending = sequence.text.push(token)
        sequence.output.push(Piece(token, text, entry))
        self._output.changed(sequence)
        if sequence.ending is not None:
            self._planner.stop(sequence)
        elif sequence.grammar is not None:
            sequence.bitmask = sequence.grammar.bitmask()

    def _emit(self) -> list[Emission]:
        emissions = list(self._output.emit())
        for emission in emissions:
            if emission.final:
                self._drop(self._sequences[emission.identity.key])
        return emissions

    def _end(self, sequence: TokenSequence, error: OmniError) -> Emission:
        self._drop(sequence)
        return Emission(identity=sequence.identity, error=error)

    def _drop(self, sequence: TokenSequence) -> None:
        del self._sequences[sequence.key]
        self._intake.remove(sequence)
        if self._description is not None:
            self._planner.leave(sequence)
            self._output.forget(sequence.key)

    def _of(self, command: Command) -> list[TokenSequence]:
        found = (self._sequences.get(identity.key) for identity in command.identities)
        return [one for one in found if one is not None]

    # calls ------------------------------------------------------------------------------------

    def controls(self) -> Mapping[str, Callable[..., Any]]:
        """Calls that the replica hands to the scheduler."""
        return {"token_stats": self.stats, "reset_prefix_cache": self.reset_prefix_cache}

    def reset_prefix_cache(self) -> None:
        if self._description is not None:
            self._planner.pool.reset()

    def stats(self) -> dict[str, int]:
        """Counts since the start (hits and queries are in blocks), and what there is now."""
        running, waiting = self.counts()
        pool = self._planner.pool if self._description is not None else BlockPool(1, 1)
        return {
            "prefix_hits": pool.hits,
            "prefix_queries": pool.queries,
            "evictions": pool.evictions,
            "preemptions": self._planner.preemptions if self._description is not None else 0,
            "kv_blocks_used": pool.num_in_use,
            "kv_blocks_total": pool.num_usable,
            "running": running,
            "waiting": waiting,
        }
