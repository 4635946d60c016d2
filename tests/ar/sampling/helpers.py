"""A sampler over a handful of rows, and a batch's worth of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omnistage.ar.sampling.features import SamplingFeatures
from omnistage.ar.sampling.row_state import SamplerState
from omnistage.ar.sampling.sampler import SampledTokens, Sampler
from omnistage.contracts.sampling import OmniTokenSamplingParams

PROMPT = [1, 2, 3]


def make_sampler(params: Sequence[OmniTokenSamplingParams], vocab_size: int, **begin) -> Sampler:
    """Row i has params[i] and seed i; further arguments go to `begin`."""
    state = SamplerState(len(params), vocab_size, "cpu")
    for row, one in enumerate(params):
        state.begin(row, one, **{"prompt_ids": PROMPT, "seed": row, **begin})
    return Sampler(state)


def sample(
    sampler: Sampler,
    params: Sequence[OmniTokenSamplingParams],
    logits: torch.Tensor,
    *,
    position: int = len(PROMPT),
    rows: Sequence[int] | None = None,
    bitmask: torch.Tensor | None = None,
) -> SampledTokens:
    rows = list(range(len(params))) if rows is None else list(rows)
    return sampler.sample(
        logits,
        torch.tensor(rows),
        torch.full((len(rows),), position),
        features=SamplingFeatures.of(params, bitmask=bitmask is not None),
        bitmask=bitmask,
    )


def draw_many(
    params: OmniTokenSamplingParams, logits: torch.Tensor, draws: int, *, seed: int = 0
) -> torch.Tensor:
    """`draws` tokens from logits (V,): one sequence at as many positions."""
    sampler = make_sampler([params], len(logits), seed=seed)
    features = SamplingFeatures.of([params])
    rows = torch.zeros(draws, dtype=torch.int64)
    positions = torch.arange(draws) + len(PROMPT)
    return sampler.sample(
        logits.expand(draws, -1).contiguous(), rows, positions, features=features
    ).tokens
