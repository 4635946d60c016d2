"""Requests on their way in: parameters checked, input gathered, prompts being prepared."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omnistage.ar.emission import OutputBuffer
from omnistage.ar.limits import check_token_params
from omnistage.ar.options import TokenOptions
from omnistage.ar.sequence import Phase, TokenSequence
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import StageRequest
from omnistage.contracts.sampling import OmniTokenSamplingParams, merge_defaults

MAX_PREPARING = 8
"""Prompts that are prepared at a time; the replica bounds its pending works too."""
_SEED_BITS = 63


@dataclass(slots=True)
class TokenIntake:
    """Sequences whose prompt is not there yet, in order of arrival."""

    options: TokenOptions
    vocab_size: int | None = None
    has_tokenizer: bool = True
    _arrivals: int = 0
    _gathering: list[TokenSequence] = field(default_factory=list)
    _preparing: list[TokenSequence] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._gathering) + len(self._preparing)

    def add(self, request: StageRequest, credits: int | None) -> TokenSequence:
        """Raises `InvalidRequestError` for parameters that this stage cannot take."""
        params = self._complete_params(request.params)
        feeds = _feeds(self.options, request.data)
        sequence = TokenSequence(
            identity=request.identity,
            params=params,
            seed=secrets.randbits(_SEED_BITS) if params.seed is None else params.seed,
            arrival=self._arrivals,
            first_input=request.data,
            input_complete=request.input_complete,
            feeds=feeds,
            output=OutputBuffer(with_payload=feeds and self.options.emits_payload),
            credits=credits,
            received=_num_ids(request.data),
        )
        self._arrivals += 1
        self._gathering.append(sequence)
        return sequence

    def append(self, sequence: TokenSequence, data: StageData, epoch: int) -> None:
        """More input. What supersedes earlier input (a higher epoch) replaces it, as long as no
        work on that has begun; what is superseded already is dropped."""
        if epoch < sequence.epoch:
            return
        if epoch > sequence.epoch:
            if sequence.phase is not Phase.INPUT:
                raise InvalidRequestError(
                    f"input of {sequence.identity} was superseded (epoch {epoch}) after this "
                    "stage had begun on it; send a new request"
                )
            sequence.epoch, sequence.first_input = epoch, data
            sequence.new_input, sequence.received = [], _num_ids(data)
        elif sequence.phase is Phase.INPUT and self.options.entry:
            sequence.first_input = _joined(sequence.first_input, data)
        else:
            sequence.new_input.append(data)
            sequence.received += _num_ids(data)

    def end(self, sequence: TokenSequence, epoch: int) -> None:
        if epoch >= sequence.epoch:
            sequence.input_complete = True

    def to_prepare(self, most: int) -> list[TokenSequence]:
        """At most `most` that can be prepared now. A user's input is prepared when all of it is
        there, a stage's when enough of it is to begin (`async_chunk`)."""
        most = min(most, MAX_PREPARING - len(self._preparing))
        if most <= 0 or not self._gathering:
            return []
        at_once = self.options.async_chunk and not self.options.entry
        least = self.options.min_input_tokens
        ready = [
            one
            for one in self._gathering
            if one.input_complete or (at_once and one.received >= least)
        ]
        ready.sort(key=lambda one: one.order)
        chosen = ready[:most]
        for one in chosen:
            self._gathering.remove(one)
            self._preparing.append(one)
            one.phase = Phase.PREPARING
        return chosen

    def remove(self, sequence: TokenSequence) -> None:
        for group in (self._gathering, self._preparing):
            if sequence in group:
                group.remove(sequence)

    def __iter__(self) -> Iterator[TokenSequence]:
        yield from self._gathering
        yield from self._preparing

    def _complete_params(self, given: Any) -> OmniTokenSamplingParams:
        if not isinstance(given, OmniTokenSamplingParams):
            raise InvalidRequestError(
                f"a token stage takes OmniTokenSamplingParams, got {type(given).__name__}"
            )
        params = merge_defaults(given, self.options.default_sampling_params)
        assert isinstance(params, OmniTokenSamplingParams)
        self.check(params)
        return params

    def check(self, params: OmniTokenSamplingParams) -> None:
        """Raises `InvalidRequestError` for what this stage cannot do."""
        check_token_params(params, self.vocab_size)
        for name in () if self.has_tokenizer else ("stop", "structured"):
            if getattr(params, name):
                raise InvalidRequestError(
                    f"{name} needs text, but this stage generates tokens only; leave it out",
                    param=name,
                )


def _feeds(options: TokenOptions, data: StageData) -> bool:
    """Whether later stages will read what this request generates here."""
    wanted = data.fields.get("output_modalities")
    if not options.feeds_stages or wanted is None:
        return options.feeds_stages
    return any(one != options.output_modality for one in wanted)


def _num_ids(data: StageData) -> int:
    ids = data.fields.get("token_ids")
    return len(ids) if ids is not None else 0


def _joined(first: StageData, more: StageData) -> StageData:
    """A user's input in parts: texts and lists are continued, other fields are replaced."""
    fields = dict(first.fields)
    for name, value in more.fields.items():
        known = fields.get(name)
        continues = name in ("prompt", "prompt_token_ids", "messages") and known is not None
        if continues and type(known) is not type(value):
            raise InvalidRequestError(
                f"{name} is continued by a {type(value).__name__}, but began as a "
                f"{type(known).__name__}",
                param=name,
            )
        fields[name] = known + value if continues else value
    twice = sorted(first.tensors.keys() & more.tensors.keys())
    if twice:
        raise InvalidRequestError(f"{twice[0]} is given twice in one streamed input")
    return StageData(
        modality=first.modality, fields=fields, tensors={**first.tensors, **more.tensors}
    )
