"""Drives a `TokenModel` by hand: paged cache, packed steps, greedy tokens; no scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omnistage.ar.model import Chunk, ModelBatch, RunningSequence
from omnistage.attention.paged import PagedKV, PagedStep, running

BLOCK_SIZE = 16
BLOCKS_PER_ROW = 64


@dataclass(eq=False)
class HandLoop:
    """Row r owns the blocks from 1 + r * BLOCKS_PER_ROW on."""

    model: Any
    rows: int
    kv: list[PagedKV] = field(default_factory=list)
    states: dict[int, dict[str, list[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch

        blocks = 1 + (self.rows + 1) * BLOCKS_PER_ROW
        for layer in self.model.layers:
            shape = (blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
            self.kv.append(PagedKV(torch.zeros(shape), torch.zeros(shape)))

    def step(self, decodes: list[RunningSequence], chunks: list[tuple[RunningSequence, int, int]]):
        """One packed step; returns the greedy token of each decode row, then of each chunk."""
        import torch

        from omnistage.attention.paged_torch import TorchPagedBackend

        model, parts = self.model, []
        ids = [sequence.token_ids[-1] for sequence in decodes]
        spans = [(s, len(s.token_ids) - 1, 1) for s in decodes] + chunks
        first, positions, slots = 0, [], []
        for number, (sequence, start, count) in enumerate(spans):
            if number < len(decodes):
                at = start + sequence.position_delta
                positions.append(torch.full((model.position_rows, 1), at))
            else:
                ids.extend(sequence.token_ids[start : start + count])
                positions.append(model.chunk_positions(sequence, start, count))
                parts.append(Chunk(sequence=sequence, start=start, count=count, first=first))
            base = (1 + sequence.row * BLOCKS_PER_ROW) * BLOCK_SIZE
            slots.extend(range(base + start, base + start + count))
            first += count
        batch = ModelBatch(
            token_ids=torch.tensor(ids),
            positions=torch.cat(positions, dim=1),
            num_decodes=len(decodes),
            rows=torch.tensor([s.row for s in decodes], dtype=torch.int64),
            chunks=tuple(parts),
        )
        contexts = [start + count for _, start, count in spans]
        tables = [
            list(range(1 + s.row * BLOCKS_PER_ROW, 1 + (s.row + 1) * BLOCKS_PER_ROW))
            for s, _, _ in spans
        ]
        paged = PagedStep(
            num_decodes=len(decodes),
            slots=torch.tensor(slots),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            chunk_lens=tuple(count for _, _, count in chunks),
            chunk_contexts=tuple(start + count for _, start, count in chunks),
            kv=self.kv,
            backend=TorchPagedBackend(),
        )
        with torch.inference_mode(), running(paged):
            paged.backend.begin(paged)
            embeds, arguments = model.embed(batch)
            output = model.forward(embeds, batch, arguments)
            last = [place - 1 for place in _ends([count for _, _, count in spans])]
            hidden = output.hidden[last]
            tokens = model.logits(hidden).argmax(-1)
            ends = [start + count == len(s.token_ids) for s, start, count in spans]
            rows = torch.tensor([s.row for s, _, _ in spans])[ends]
            model.sampled(rows, hidden[ends], tokens[ends])
        self._keep_states(chunks, len(decodes), output.states | {"hidden": output.hidden})
        return tokens.tolist()

    def _keep_states(self, chunks, first, states):
        for sequence, _, count in chunks:
            kept = self.states.setdefault(sequence.row, {})
            for name, value in states.items():
                kept.setdefault(name, []).append(value[first : first + count])
            first += count

    def begin(self, prompt: Any, params: Any, row: int) -> RunningSequence:
        import torch

        sequence = RunningSequence(
            prompt=prompt, params=params, row=row, token_ids=list(prompt.token_ids)
        )
        with torch.inference_mode():
            sequence.media = (
                dict(enumerate(self.model.encode(prompt.media))) if prompt.media else {}
            )
            self.model.begin(sequence)
        return sequence

    def prefill(self, sequence: RunningSequence, chunk: int = 10_000) -> None:
        """Compute all known tokens, in chunks, and append the token that follows."""
        total = len(sequence.token_ids)
        for start in range(0, total, chunk):
            (token,) = self.step([], [(sequence, start, min(chunk, total - start))])
        sequence.token_ids.append(token)

    def kept(self, sequence: RunningSequence) -> dict[str, Any]:
        """(P, …) of all positions that were computed in chunks, "hidden" among them."""
        import torch

        return {name: torch.cat(parts) for name, parts in self.states[sequence.row].items()}

    def prompt_payload(self, sequence: RunningSequence) -> dict[str, Any]:
        return self.model.prompt_payload(sequence, self.kept(sequence))


def _ends(counts: list[int]) -> list[int]:
    ends, total = [], 0
    for count in counts:
        total += count
        ends.append(total)
    return ends
