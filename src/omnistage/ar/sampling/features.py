"""What a batch asks of the sampler, known on the host: chooses the cheap path and keys graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omnistage.contracts.sampling import MAX_LOGPROBS, OmniTokenSamplingParams

NO_LOGPROBS = -1
LOGPROB_SIZES = (0, 1, 5, MAX_LOGPROBS)
CANDIDATE_SIZES = (64, 256)
"""How many of the most likely tokens are looked at when every filtered row has a small top_k."""
TIE_MARGIN = 16
"""A row's top_k stays below the candidates by this much: `transformers` keeps every token that
ties with the k-th, so that many ties are kept too."""


def is_greedy(params: OmniTokenSamplingParams) -> bool:
    return params.temperature == 0


def has_penalties(params: OmniTokenSamplingParams) -> bool:
    repetition = params.repetition_penalty not in (None, 1)
    return repetition or bool(params.presence_penalty) or bool(params.frequency_penalty)


def wants_top_p(params: OmniTokenSamplingParams) -> bool:
    return params.top_p is not None and params.top_p < 1


def wants_top_k(params: OmniTokenSamplingParams) -> bool:
    return params.top_k is not None and params.top_k > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFeatures:
    """Hashable; two batches with equal features run the same operations.

    `candidates`: every row that is not greedy has a top_k, and this many of the most likely tokens
    hold all that may be drawn; 0: the whole vocabulary is drawn from. `sorts`: some row's top_p
    or large top_k needs the whole vocabulary in order. `logprobs`: how many of the most likely to
    report, `NO_LOGPROBS` for none at all.
    """

    greedy_only: bool = True
    penalties: bool = False
    bias: bool = False
    min_tokens: bool = False
    bitmask: bool = False
    candidates: int = 0
    sorts: bool = False
    min_p: bool = False
    logprobs: int = NO_LOGPROBS

    @property
    def changes_logits(self) -> bool:
        return self.penalties or self.bias or self.min_tokens or self.bitmask

    @classmethod
    def of(
        cls, batch: Iterable[OmniTokenSamplingParams], *, bitmask: bool = False
    ) -> SamplingFeatures:
        """Features of the rows that sample in one step. `bitmask`: some row has a grammar."""
        rows = list(batch)
        drawn = [params for params in rows if not is_greedy(params)]
        candidates = _candidates(drawn)
        return cls(
            greedy_only=not drawn,
            penalties=any(has_penalties(params) for params in rows),
            bias=any(params.logit_bias for params in rows),
            min_tokens=any(params.min_tokens > 0 for params in rows),
            bitmask=bitmask,
            candidates=candidates,
            sorts=not candidates and any(wants_top_p(p) or wants_top_k(p) for p in drawn),
            min_p=any(params.min_p for params in drawn),
            logprobs=_logprobs(rows),
        )


def _candidates(drawn: list[OmniTokenSamplingParams]) -> int:
    if not drawn or not all(wants_top_k(params) for params in drawn):
        return 0
    largest = max(params.top_k or 0 for params in drawn) + TIE_MARGIN
    return next((size for size in CANDIDATE_SIZES if largest <= size), 0)


def _logprobs(rows: list[OmniTokenSamplingParams]) -> int:
    asked = [params.logprobs for params in rows if params.logprobs is not None]
    if not asked:
        return NO_LOGPROBS
    return next(size for size in LOGPROB_SIZES if max(asked) <= size)
