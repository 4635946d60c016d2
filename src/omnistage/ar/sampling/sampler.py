"""One step's tokens: device-agnostic, without host synchronisation, with shapes that depend on
nothing but the batch's, so that it may be captured in a graph keyed by its features."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omnistage.ar.sampling import constraints
from omnistage.ar.sampling.features import NO_LOGPROBS, SamplingFeatures
from omnistage.ar.sampling.filters import descending, min_p_threshold, ordered_threshold
from omnistage.ar.sampling.logprobs import Logprobs, logprobs_of
from omnistage.ar.sampling.random import exponential_noise, step_keys
from omnistage.ar.sampling.row_state import SamplerState

NamedRows = dict[str, torch.Tensor]

CACHED_LOGITS = 2**18
"""On a CPU, work of many passes takes so many logits at once, to stay in the cache: 64 rows of
151,936 with penalties take 170 ms instead of 338, drawn from everything 111 instead of 207."""


@dataclass(slots=True, kw_only=True)
class SampledTokens:
    """tokens (R,) int64; finite (R,) bool: False where the logits were no numbers or nothing was
    allowed, and the token means nothing. `logprobs` where the features ask for them."""

    tokens: torch.Tensor
    finite: torch.Tensor
    logprobs: Logprobs | None = None


class Sampler:
    """Order of operations: bias, stops forbidden by min_tokens, penalties, grammar; then
    temperature, top-k, top-p, min-p (the order of `transformers.generate`); then the draw."""

    def __init__(self, state: SamplerState) -> None:
        self.state = state

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        *,
        features: SamplingFeatures,
        bitmask: torch.Tensor | None = None,
    ) -> SampledTokens:
        """logits (R, V) of any float type; rows (R,) int64, `max_num_seqs` for padding; positions
        (R,) int64: the place in its sequence of the token to be sampled, that is how many tokens,
        prompt included, stand before it. bitmask (R, ceil(V / 32)) int32 where the features have
        it, all ones (-1) for a row without a grammar.
        """
        if features == SamplingFeatures():
            best, tokens = logits.max(1)
            return SampledTokens(tokens=tokens, finite=best.isfinite())
        size = _rows_at_once(logits, features)
        parts = [
            self._sample(
                logits[first : first + size],
                rows[first : first + size],
                positions[first : first + size],
                features,
                None if bitmask is None else bitmask[first : first + size],
            )
            for first in range(0, len(logits), size)
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        features: SamplingFeatures,
        bitmask: torch.Tensor | None,
    ) -> SampledTokens:
        if not _fuses(logits, features) or features.changes_logits or _asks(features):
            logits = logits.float()
        allowed = logits
        if features.changes_logits:
            allowed = self._constrained(logits, rows, positions, features, bitmask)
        best, tokens = allowed.max(1)
        finite = best.isfinite()
        if features.changes_logits:
            finite = finite & logits.amax(1).isfinite()
        if not features.greedy_only:
            draw = self._draw_fused if _fuses(logits, features) else self._draw_eager
            tokens = draw(allowed, best, tokens, rows, positions, features)
        if features.penalties:
            self.state.count(rows, tokens)
        logprobs = logprobs_of(logits, tokens, features.logprobs) if _asks(features) else None
        return SampledTokens(tokens=tokens, finite=finite, logprobs=logprobs)

    def _constrained(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        features: SamplingFeatures,
        bitmask: torch.Tensor | None,
    ) -> torch.Tensor:
        state = self.state
        floats, integers = state.of_rows(rows)
        if features.bias:
            assert state.bias is not None, "reserve() was not called for logit_bias"
            logits = constraints.add_bias(logits, state.bias.ids[rows], state.bias.values[rows])
        if features.min_tokens:
            places = torch.arange(state.stop_ids.shape[1], device=logits.device)
            in_use = places < integers["stop_count"].unsqueeze(1)
            early = positions - integers["prompt_tokens"] < integers["min_tokens"]
            logits = constraints.forbid_stops(logits, state.stop_ids[rows], in_use, early)
        if features.penalties:
            assert state.counts is not None, "reserve() was not called for penalties"
            logits = constraints.apply_penalties(
                logits,
                state.counts.in_prompt[rows],
                state.counts.generated[rows],
                floats["repetition"],
                floats["presence"],
                floats["frequency"],
            )
        if features.bitmask:
            assert bitmask is not None, "the features have a bitmask, the call has none"
            logits = constraints.apply_bitmask(logits, bitmask)
        return logits

    def _draw_fused(
        self,
        allowed: torch.Tensor,
        best: torch.Tensor,
        greedy: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        features: SamplingFeatures,
    ) -> torch.Tensor:
        """(R,) int64: `greedy` where the temperature is 0, else drawn from the whole vocabulary."""
        from omnistage.ar.sampling.triton_draw import draw
        from omnistage.ar.sampling.triton_threshold import ordered_thresholds

        found = None
        if features.sorts:
            found = ordered_thresholds(allowed, best, rows, self.state)
        return draw(allowed, best, greedy, rows, positions, self.state, thresholds=found)

    def _draw_eager(
        self,
        allowed: torch.Tensor,
        best: torch.Tensor,
        greedy: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        features: SamplingFeatures,
    ) -> torch.Tensor:
        """As `_draw_fused`, for any device, and from candidates where the features have them."""
        floats, integers = self.state.of_rows(rows)
        keys = step_keys(integers["seed"], positions)
        drawn = self._draw(allowed, best, keys, floats, integers["top_k"], features)
        return torch.where(floats["temperature"] > 0, drawn, greedy)

    def _draw(
        self,
        allowed: torch.Tensor,
        best: torch.Tensor,
        keys: torch.Tensor,
        floats: NamedRows,
        top_k: torch.Tensor,
        features: SamplingFeatures,
    ) -> torch.Tensor:
        """(R,) int64. Rows of temperature 0 draw at temperature 1 and are discarded."""
        temperature = torch.where(floats["temperature"] > 0, floats["temperature"], 1.0)
        ids, hashes = None, self.state.hashes
        if features.candidates:
            size = min(features.candidates, allowed.shape[1])
            allowed, ids = allowed.topk(size, dim=1)
            hashes = hashes[ids]
        scaled = (allowed - best.unsqueeze(1)).div_(temperature.unsqueeze(1))
        threshold = _threshold(scaled, floats, top_k, features)
        weights = scaled.exp()
        if threshold is not None:
            weights = torch.where(scaled >= threshold.unsqueeze(1), weights, 0.0)
        winner = weights.div_(exponential_noise(keys, hashes)).max(1).indices
        return winner if ids is None else ids.gather(1, winner.unsqueeze(1)).squeeze(1)


def _fuses(logits: torch.Tensor, features: SamplingFeatures) -> bool:
    """Whether kernels of our own draw: on CUDA, from the whole vocabulary."""
    draws_from_all = not features.greedy_only and not features.candidates
    return logits.device.type == "cuda" and draws_from_all


def _asks(features: SamplingFeatures) -> bool:
    return features.logprobs != NO_LOGPROBS


def _rows_at_once(logits: torch.Tensor, features: SamplingFeatures) -> int:
    draws_from_all = not features.greedy_only and not features.candidates
    if logits.device.type != "cpu" or not (draws_from_all or features.changes_logits):
        return max(len(logits), 1)
    return max(CACHED_LOGITS // logits.shape[1], 1)


def _joined(parts: list[SampledTokens]) -> SampledTokens:
    found = [part.logprobs for part in parts if part.logprobs is not None]
    return SampledTokens(
        tokens=torch.cat([part.tokens for part in parts]),
        finite=torch.cat([part.finite for part in parts]),
        logprobs=Logprobs.joined(found) if found else None,
    )


def _threshold(
    scaled: torch.Tensor, floats: NamedRows, top_k: torch.Tensor, features: SamplingFeatures
) -> torch.Tensor | None:
    """(R,), None where nothing is filtered. Candidates come in order; greedy rows among them may
    have no top_k, which does not matter."""
    found = None
    if features.candidates or features.sorts:
        ordered = scaled if features.candidates else descending(scaled)
        found = ordered_threshold(ordered, top_k, floats["top_p"])
    if features.min_p:
        by_min_p = min_p_threshold(floats["min_p"])
        found = by_min_p if found is None else torch.maximum(found, by_min_p)
    return found
