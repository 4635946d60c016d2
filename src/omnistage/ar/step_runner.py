"""One step on the device: embeddings, layers, logits, tokens, and what the next step needs of them.

Steps of decode rows only run `StepRunner.run_decode` on buffers that stay in place, through
`decode_forward`: captured graphs of it take its place there. Steps with chunks are packed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from omnistage.ar.model import Chunk, ModelBatch, TokenModel
from omnistage.ar.sampling.features import SamplingFeatures
from omnistage.ar.step_input import DecodeInput, DecodeRow
from omnistage.attention.paged import PagedBackend, PagedStep, running

if TYPE_CHECKING:
    import torch

    from omnistage.ar.kv_cache import KVCache
    from omnistage.ar.running import Running
    from omnistage.ar.sampling.logprobs import Logprobs
    from omnistage.ar.sampling.sampler import Sampler
    from omnistage.ar.step import StepRow


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Of R sampled rows, decode rows first: tokens (R,) int64, finite (R,) bool, `payload` by name,
    each (R, …). Of a captured graph these are its own memory: copy them before the next step."""

    tokens: torch.Tensor
    finite: torch.Tensor
    logprobs: Logprobs | None
    payload: dict[str, torch.Tensor]

    def first(self, rows: int) -> StepResult:
        """Without the padding behind so many rows."""
        return StepResult(
            tokens=self.tokens[:rows],
            finite=self.finite[:rows],
            logprobs=None if self.logprobs is None else self.logprobs.first(rows),
            payload={name: tensor[:rows] for name, tensor in self.payload.items()},
        )

    def joined(self, behind: StepResult | None) -> StepResult:
        """With the rows of another result behind; None has none."""
        import torch

        if behind is None:
            return self
        logprobs = self.logprobs
        if logprobs is not None and behind.logprobs is not None:
            logprobs = type(logprobs).joined([logprobs, behind.logprobs])
        return StepResult(
            tokens=torch.cat([self.tokens, behind.tokens]),
            finite=torch.cat([self.finite, behind.finite]),
            logprobs=logprobs,
            payload={
                name: torch.cat([tensor, behind.payload[name]])
                for name, tensor in self.payload.items()
            },
        )


LiveRow = tuple["StepRow", "Running"]
HiddenAndLogits = tuple["torch.Tensor", "torch.Tensor"]


class StepRunner:
    """`decode_forward(size)` runs a step of `size` decode rows that `step_input` holds, up to its
    logits; `padded(rows)` says to what size so many rows are padded: captured graphs take the place
    of both. With `splits_mixed` a step's decode rows run apart from its chunks: by a graph, one
    more pass over the weights costs less than a step without. With `payloads`, every step makes
    what later stages need."""

    def __init__(
        self,
        model: TokenModel,
        cache: KVCache,
        backend: PagedBackend,
        step_input: DecodeInput,
        sampler: Sampler,
        *,
        payloads: bool,
    ) -> None:
        self.model, self.cache, self.backend = model, cache, backend
        self.step_input, self.sampler = step_input, sampler
        self.payloads = payloads
        self.decode_forward: Callable[[int], HiddenAndLogits] = self.run_decode
        self.padded: Callable[[int], int] = lambda rows: rows
        self.splits_mixed = False

    def run(self, rows: Sequence[LiveRow]) -> StepResult | None:
        """Decode rows come first. None when no row samples."""
        decodes = [one for one in rows if one[0].decodes]
        sampling = [one for one in rows if one[0].samples]
        features = SamplingFeatures.of(
            (live.sequence.params for _, live in sampling),
            bitmask=any(row.bitmask is not None for row, _ in sampling),
        )
        if len(decodes) == len(rows):
            return self._run_decodes(decodes, features)
        chunks = rows[len(decodes) :]
        if not decodes or not self.splits_mixed:
            return self._run_mixed(decodes, chunks, sampling, features)
        decoded = self._run_decodes(decodes, features).first(len(decodes))
        ending = [one for one in chunks if one[0].samples]
        return decoded.joined(self._run_mixed([], chunks, ending, features))

    def _run_decodes(self, rows: Sequence[LiveRow], features: SamplingFeatures) -> StepResult:
        """`features` are the whole step's, chunks included; masks are these rows' own."""
        features = replace(features, bitmask=any(row.bitmask is not None for row, _ in rows))
        size = self.padded(len(rows))
        self.step_input.fill([self._decode_row(*one) for one in rows], size)
        return self._decode(size, features)

    def run_decode(self, size: int) -> HiddenAndLogits:
        """hidden (size, hidden_size), logits (size, vocab_size). Reads only `step_input` and state
        by row; never synchronizes with the host where the model and the backend do not: capturable.
        """
        filled = self.step_input
        batch = ModelBatch(
            token_ids=filled.token_ids(size),
            positions=filled.positions(size),
            num_decodes=size,
            rows=filled.rows(size),
        )
        step = PagedStep(
            num_decodes=size,
            slots=filled.slots(size),
            block_tables=filled.block_tables(size),
            context_lens=filled.context_lens(size),
            kv=self.cache.layers,
            backend=self.backend,
        )
        hidden = self._forward(batch, step)
        return hidden, self.model.logits(hidden)

    def warm_sampling(self, size: int, features: SamplingFeatures) -> None:
        """Sample a step of padding, so that no request waits for a kernel to be compiled."""
        self.sampler.state.reserve(features)
        self.step_input.fill([], size)
        self._decode(size, features)

    def _decode(self, size: int, features: SamplingFeatures) -> StepResult:
        filled = self.step_input
        hidden, logits = self.decode_forward(size)
        bitmask = filled.bitmask(size) if features.bitmask else None
        places = filled.sample_places(size)
        return self._sample(hidden, logits, filled.rows(size), places, features, bitmask)

    def _run_mixed(
        self,
        decodes: Sequence[LiveRow],
        chunk_rows: Sequence[LiveRow],
        sampling: Sequence[LiveRow],
        features: SamplingFeatures,
    ) -> StepResult | None:
        filled = self.step_input
        all_rows = [*decodes, *chunk_rows]
        rows = self._to_device([[live.sequence.row for _, live in all_rows]])[0]
        batch = self._pack(decodes, chunk_rows, rows)
        hidden = self._forward(batch, self._mixed_step(all_rows, len(decodes), rows))
        if not sampling:
            return None
        size = self.padded(len(sampling))
        padding = size - len(sampling)
        lasts = self._last_places(decodes, chunk_rows) + [0] * padding
        numbers = [live.sequence.row for _, live in sampling] + [filled.max_num_seqs] * padding
        places = [row.start + row.count for row, _ in sampling] + [1] * padding
        lasts, sample_rows, sample_places = self._to_device([lasts, numbers, places])
        bitmask = None
        if features.bitmask:
            masks = [row.bitmask for row, _ in sampling] + [None] * padding
            host = filled.host_bitmask(masks, size)
            bitmask = host.to(filled.device, non_blocking=True)
        last = hidden[lasts]
        return self._sample(
            last, self.model.logits(last), sample_rows, sample_places, features, bitmask
        )

    def _pack(
        self, decodes: Sequence[LiveRow], chunk_rows: Sequence[LiveRow], rows: torch.Tensor
    ) -> ModelBatch:
        import torch

        filled = self.step_input
        position_rows = self.model.position_rows
        chunks, tokens = [], []
        positions = [
            torch.tensor([[row.start + live.sequence.position_delta]] * position_rows)
            for row, live in decodes
        ]
        for row, live in chunk_rows:
            sequence, first = live.sequence, len(decodes) + len(tokens)
            chunks.append(Chunk(sequence=sequence, start=row.start, count=row.count, first=first))
            tokens += sequence.token_ids[row.start : row.start + row.count]
            positions.append(self.model.chunk_positions(sequence, row.start, row.count))
        decode_rows = rows[: len(decodes)]
        token_ids = torch.cat([filled.last_tokens[decode_rows], self._to_device([tokens])[0]])
        return ModelBatch(
            token_ids=token_ids,
            positions=torch.cat(positions, dim=1).to(filled.device, non_blocking=True),
            num_decodes=len(decodes),
            rows=decode_rows,
            chunks=tuple(chunks),
        )

    def _mixed_step(
        self, all_rows: Sequence[LiveRow], num_decodes: int, rows: torch.Tensor
    ) -> PagedStep:
        import torch

        size = self.cache.plan.block_size
        slots = [
            slot
            for row, live in all_rows
            for slot in live.slots(row.start, row.start + row.count, size)
        ]
        contexts = [row.start + row.count for row, _ in all_rows]
        width = max(len(live.blocks) for _, live in all_rows)
        return PagedStep(
            num_decodes=num_decodes,
            slots=self._to_device([slots])[0],
            block_tables=self.step_input.tables[:, :width][rows],
            context_lens=self._to_device([contexts])[0].to(torch.int32),
            chunk_lens=tuple(row.count for row, _ in all_rows[num_decodes:]),
            chunk_contexts=tuple(contexts[num_decodes:]),
            kv=self.cache.layers,
            backend=self.backend,
        )

    def _forward(self, batch: ModelBatch, step: PagedStep) -> torch.Tensor:
        embeds, arguments = self.model.embed(batch)
        with running(step):
            output = self.model.forward(embeds, batch, arguments)
        self.cache.write_states(output.states, step.slots)
        return output.hidden

    def _sample(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        features: SamplingFeatures,
        bitmask: torch.Tensor | None,
    ) -> StepResult:
        found = self.sampler.sample(logits, rows, places, features=features, bitmask=bitmask)
        self.step_input.last_tokens.index_copy_(0, rows, found.tokens)
        self.model.sampled(rows, hidden, found.tokens)
        return StepResult(
            tokens=found.tokens,
            finite=found.finite,
            logprobs=found.logprobs,
            payload=self.model.step_payload(rows) if self.payloads else {},
        )

    def _decode_row(self, row: StepRow, live: Running) -> DecodeRow:
        return DecodeRow(
            row=live.sequence.row,
            index=row.start,
            position=row.start + live.sequence.position_delta,
            slot=live.slot(row.start, self.cache.plan.block_size),
            num_blocks=len(live.blocks),
            bitmask=row.bitmask,
        )

    @staticmethod
    def _last_places(decodes: Sequence[LiveRow], chunk_rows: Sequence[LiveRow]) -> list[int]:
        """Packed places of the positions whose logits are sampled."""
        places = [index for index, (row, _) in enumerate(decodes) if row.samples]
        first = len(decodes)
        for row, _ in chunk_rows:
            first += row.count
            if row.samples:
                places.append(first - 1)
        return places

    def _to_device(self, values: Sequence[Sequence[int]]) -> torch.Tensor:
        return self.step_input.host_tensor(values).to(self.step_input.device, non_blocking=True)
