"""What a token stage's executor says of itself once its model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnistage.contracts.payloads import StageData


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDescription:
    """The answer to "describe" (`ar.step`). `capacity` is how many positions one sequence may have
    at most when it has the whole cache to itself."""

    tokenizer: Any
    eos_token_ids: frozenset[int]
    vocab_size: int
    num_blocks: int
    block_size: int
    max_model_len: int
    lag: int

    @classmethod
    def of(cls, data: StageData) -> StageDescription:
        return cls(**data.fields)

    @property
    def capacity(self) -> int:
        return (self.num_blocks - 1) * self.block_size
