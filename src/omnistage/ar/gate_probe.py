"""Probe sequences of the gate at load, and how they are run: packed by pages, or alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from omnistage.ar.kv_cache import CachePlan, KVCache
from omnistage.ar.model import Chunk, ModelBatch, RunningSequence
from omnistage.ar.prompt import PreparedPrompt
from omnistage.attention.paged import PagedBackend, PagedKV, PagedStep, running
from omnistage.contracts.sampling import OmniTokenSamplingParams

if TYPE_CHECKING:
    from omnistage.ar.model import TokenModel

LENGTHS = (11, 7, 13)
"""Tokens of the probe sequences."""
BLOCK_SIZE = 4


@torch.inference_mode()
def run_widest(
    model: TokenModel, backend: PagedBackend, dtype: torch.dtype, tokens: int, samples: int
) -> None:
    """One chunk of `tokens` (or the model's longest sequence), logits of `samples` positions."""
    tokens = min(tokens, model.max_model_len)
    sequence = probe_sequences(model, (tokens,))[0]
    width = -(-tokens // BLOCK_SIZE)
    plan = CachePlan(
        num_blocks=1 + width, block_size=BLOCK_SIZE, max_model_len=tokens, token_bytes=0
    )
    cache = KVCache(plan, model.layers, {}, dtype=dtype, device=str(device_of(model)))
    chunk = Chunk(sequence=sequence, start=0, count=tokens, first=0)
    model.begin(sequence)
    try:
        step = paged_step([chunk], cache.layers, backend, device_of(model), width)
        model.logits(run_forward(model, step, [chunk])[:samples])
    finally:
        model.release(sequence)


def probe_sequences(model: Any, lengths: Sequence[int] = LENGTHS) -> list[RunningSequence]:
    """Sequences that a model makes up itself (`probe_prompts`), else of text tokens."""
    own = getattr(model, "probe_prompts", None)
    if own is not None:
        prompts = own(lengths)
    else:
        generator = torch.Generator().manual_seed(0)
        limit = min(model.vocab_size, 1000)
        prompts = [
            PreparedPrompt(token_ids=torch.randint(limit, (n,), generator=generator).tolist())
            for n in lengths
        ]
    return [
        RunningSequence(
            prompt=prompt,
            params=OmniTokenSamplingParams(),
            row=row,
            token_ids=list(prompt.token_ids),
        )
        for row, prompt in enumerate(prompts)
    ]


def probe_chunks(
    sequences: Sequence[RunningSequence], parts: Sequence[tuple[int, int, int]]
) -> list[Chunk]:
    chunks, first = [], 0
    for index, start, count in parts:
        chunks.append(Chunk(sequence=sequences[index], start=start, count=count, first=first))
        first += count
    return chunks


def paged_step(
    chunks: Sequence[Chunk],
    layers: list[PagedKV],
    backend: PagedBackend,
    device: torch.device,
    width: int,
) -> PagedStep:
    """One token is attended as a decode step, though the model hears of a chunk of one."""
    decodes = sum(chunk.count == 1 for chunk in chunks)
    tables = [[1 + chunk.sequence.row * width + i for i in range(width)] for chunk in chunks]
    slots = [
        tables[index][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for index, chunk in enumerate(chunks)
        for p in range(chunk.start, chunk.start + chunk.count)
    ]
    contexts = [chunk.start + chunk.count for chunk in chunks]
    return PagedStep(
        num_decodes=decodes,
        slots=torch.tensor(slots, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        chunk_lens=tuple(chunk.count for chunk in chunks[decodes:]),
        chunk_contexts=tuple(contexts[decodes:]),
        kv=layers,
        backend=backend,
    )


def run_forward(model: TokenModel, step: PagedStep | None, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Hidden states (T, hidden_size). `step` None: the module attends by itself."""
    device = device_of(model)
    tokens = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.count]]
    positions = [model.chunk_positions(c.sequence, c.start, c.count) for c in chunks]
    batch = ModelBatch(
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.cat(positions, dim=1).to(device),
        num_decodes=0,
        rows=torch.empty(0, dtype=torch.int64, device=device),
        chunks=tuple(chunks),
    )
    embeds, arguments = model.embed(batch)
    if step is None:
        return model.forward(embeds, batch, arguments).hidden
    with running(step):
        return model.forward(embeds, batch, arguments).hidden


def dtype_of(model: TokenModel) -> torch.dtype:
    """Of the model's weights, and so of its keys and values."""
    kinds = (
        p.dtype for p in model.module.parameters() if p.is_floating_point() and p.dtype.itemsize > 1
    )
    return next(kinds)


def device_of(model: TokenModel) -> torch.device:
    return next(model.module.parameters()).device
