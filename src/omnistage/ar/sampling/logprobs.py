"""Log-probabilities of the distribution before temperature, penalties and filters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from omnistage.ar.step import TokenLogprobs

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class Logprobs:
    """logprob (R,) float32 and rank (R,) int64 of the sampled token; top_ids (R, k) int64 and
    top_logprobs (R, k) float32 of the most likely ones, most likely first."""

    logprob: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def joined(cls, parts: list[Logprobs]) -> Logprobs:
        """The rows of all parts, in order."""
        import torch

        def together(name: str) -> torch.Tensor:
            return torch.cat([getattr(part, name) for part in parts])

        return cls(**{each.name: together(each.name) for each in fields(cls)})

    def first(self, rows: int) -> Logprobs:
        """Without what is behind so many rows."""
        return Logprobs(**{each.name: getattr(self, each.name)[:rows] for each in fields(self)})

    def of_row(self, index: int, count: int) -> TokenLogprobs:
        """Row `index` for a request with `logprobs=count`. On host tensors: it reads values."""
        ids = self.top_ids[index, :count].tolist()
        values = self.top_logprobs[index, :count].tolist()
        return TokenLogprobs(
            logprob=float(self.logprob[index]),
            rank=int(self.rank[index]),
            top=list(zip(ids, values, strict=True)),
        )


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Logprobs:
    """logits (R, V) float32, tokens (R,) int64; `count` most likely tokens a row."""
    total = logits.logsumexp(1, keepdim=True)
    own = logits.gather(1, tokens.unsqueeze(1))
    values, ids = logits.topk(min(count, logits.shape[1]), dim=1)
    return Logprobs(
        logprob=(own - total).squeeze(1),
        rank=(logits > own).sum(1) + 1,
        top_ids=ids,
        top_logprobs=values - total,
    )
