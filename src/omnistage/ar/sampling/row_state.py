"""Per-row state of the sampler on its device: parameters, seeds, and what was generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omnistage.ar.host_tensors import to_device
from omnistage.ar.sampling.features import SamplingFeatures, has_penalties
from omnistage.ar.sampling.random import signed_seed, token_hashes
from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.sampling import MAX_LOGIT_BIAS, OmniTokenSamplingParams

MAX_STOP_IDS = 1152
"""End-of-sequence ids and a request's own stop ids together, where `min_tokens` forbids them."""

FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INTEGERS = ("seed", "top_k", "prompt_tokens", "min_tokens", "stop_count")


@dataclass(slots=True)
class _Bias:
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class _Counts:
    in_prompt: torch.Tensor
    generated: torch.Tensor


class SamplerState:
    """State of rows 0 … max_num_seqs - 1, and of the spare row max_num_seqs for padding.

    Tables that a (rows, vocabulary) or (rows, bias) feature needs are made when it is first used:
    `reserve` makes them ahead of a graph's capture.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self.num_rows = max_num_seqs + 1
        self.hashes = token_hashes(vocab_size, self.device)
        self.floats = self._zeros(len(FLOATS), dtype=torch.float32)
        self.integers = self._zeros(len(INTEGERS), dtype=torch.int64)
        self.stop_ids = self._zeros(MAX_STOP_IDS, dtype=torch.int64)
        self.bias: _Bias | None = None
        self.counts: _Counts | None = None
        self.release(max_num_seqs)

    def begin(
        self,
        row: int,
        params: OmniTokenSamplingParams,
        *,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int] = (),
        seed: int,
        penalized: bool = True,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """A sequence gets `row`. `generated_ids` are those it has after a preemption; `penalized`:
        the repetition penalty counts the prompt; `stop_ids` are the tokens that `min_tokens`
        suppresses (the model's end-of-sequence ids and the request's own).

        Raises `InvalidRequestError` for more stop ids or biases than a row holds.
        """
        stops = sorted(set(stop_ids)) if params.min_tokens > 0 else []
        if len(stops) > MAX_STOP_IDS:
            raise InvalidRequestError(
                f"{len(stops)} stop token ids, at most {MAX_STOP_IDS} are allowed with the model's "
                "own; give fewer",
                param="stop_token_ids",
            )
        self._write(self.floats, row, _floats_of(params))
        self._write(
            self.integers,
            row,
            [
                signed_seed(seed),
                max(params.top_k or 0, 0),
                len(prompt_ids),
                params.min_tokens,
                len(stops),
            ],
        )
        if stops:
            self._write(self.stop_ids, row, stops)
        self._begin_bias(row, params)
        if has_penalties(params):
            self._begin_counts(row, prompt_ids if penalized else (), generated_ids)

    def release(self, row: int) -> None:
        """The row is free: it samples greedily and unconstrained until the next `begin`."""
        self._write(self.floats, row, [0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
        self.integers[row].zero_()
        if self.bias is not None:
            self.bias.values[row].zero_()

    def reserve(self, features: SamplingFeatures) -> None:
        """Make the tables that `features` need; call it before capturing a graph with them."""
        if features.bias and self.bias is None:
            ids = self._zeros(MAX_LOGIT_BIAS, dtype=torch.int64)
            self.bias = _Bias(ids, self._zeros(MAX_LOGIT_BIAS, dtype=torch.float32))
        if features.penalties and self.counts is None:
            in_prompt = self._zeros(self.vocab_size, dtype=torch.bool)
            self.counts = _Counts(in_prompt, self._zeros(self.vocab_size, dtype=torch.int32))

    def of_rows(
        self, rows: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Float32 and int64 parameters of `rows` (R,) by name, each (R,)."""
        floats, integers = self.floats[rows], self.integers[rows]
        return dict(zip(FLOATS, floats.unbind(1), strict=True)), dict(
            zip(INTEGERS, integers.unbind(1), strict=True)
        )

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Rows (R,) generated tokens (R,). Capturable; rows may repeat (padding)."""
        assert self.counts is not None
        places = rows * self.vocab_size + tokens
        ones = torch.ones_like(places, dtype=torch.int32)
        self.counts.generated.view(-1).scatter_add_(0, places, ones)

    def _begin_bias(self, row: int, params: OmniTokenSamplingParams) -> None:
        if not params.logit_bias and self.bias is None:
            return
        if len(params.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(params.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are "
                "allowed",
                param="logit_bias",
            )
        self.reserve(SamplingFeatures(bias=True))
        assert self.bias is not None
        self.bias.values[row].zero_()
        if params.logit_bias:
            self._write(self.bias.ids, row, list(params.logit_bias))
            self._write(self.bias.values, row, list(params.logit_bias.values()))

    def _begin_counts(
        self, row: int, prompt_ids: Sequence[int], generated_ids: Sequence[int]
    ) -> None:
        self.reserve(SamplingFeatures(penalties=True))
        assert self.counts is not None
        in_prompt = torch.zeros(self.vocab_size, dtype=torch.bool)
        in_prompt[[i for i in set(prompt_ids) if i < self.vocab_size]] = True
        generated = torch.tensor(list(generated_ids), dtype=torch.int64)
        counts = torch.bincount(generated, minlength=self.vocab_size)
        self.counts.in_prompt[row].copy_(to_device(in_prompt, torch.bool, self.device))
        self.counts.generated[row].copy_(to_device(counts, torch.int32, self.device))

    def _zeros(self, width: int, *, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.num_rows, width, dtype=dtype, device=self.device)

    @staticmethod
    def _write(table: torch.Tensor, row: int, values: list[int] | list[float]) -> None:
        table[row, : len(values)].copy_(to_device(values, table.dtype, table.device))


def _floats_of(params: OmniTokenSamplingParams) -> list[float]:
    """None stands for what changes nothing: the engine has filled in the model's defaults."""

    def given(value: float | None, neutral: float) -> float:
        return neutral if value is None else float(value)

    return [
        given(params.temperature, 1.0),
        given(params.top_p, 1.0),
        given(params.min_p, 0.0),
        given(params.repetition_penalty, 1.0),
        given(params.presence_penalty, 0.0),
        given(params.frequency_penalty, 0.0),
    ]
