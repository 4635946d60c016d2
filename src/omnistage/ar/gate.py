"""The gate at load: packed batches must give what the model gives each sequence alone.

`observe_layers` finds out what each layer keeps, from what it hands to attention. `check_packed`
runs probe sequences packed together, in chunks and decode steps, against the unmodified module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from omnistage.ar.cache_spec import LayerSpec
from omnistage.ar.kv_cache import CachePlan, KVCache
from omnistage.ar.model import Chunk, ModelBatch, RunningSequence
from omnistage.ar.prompt import PreparedPrompt
from omnistage.attention.paged import NAME, PagedBackend, PagedKV, PagedStep, running
from omnistage.contracts.errors import OmniError, UnsupportedCombinationError
from omnistage.contracts.sampling import OmniTokenSamplingParams

if TYPE_CHECKING:
    from omnistage.ar.model import TokenModel

LENGTHS = (11, 7, 13)
"""Tokens of the probe sequences."""
STEPS = (((0, 0, 6), (1, 0, 7)), ((2, 0, 5), (0, 6, 4)), ((0, 10, 1), (2, 5, 7)), ((2, 12, 1),))
"""By step, (sequence, first position, count): chunks cut at odd places beside decode steps."""
BLOCK_SIZE = 4
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Of the root mean square of the difference to that of the logits. A leak between sequences, or
a layer that sees other keys, is of the order of 1; rounding may choose other experts."""


@dataclass(slots=True, eq=False)
class _Recorder(PagedBackend):
    """Plain causal attention over the one chunk there is, and what each layer asked for."""

    calls: list[int] = field(default_factory=list)
    specs: dict[int, LayerSpec] = field(default_factory=dict)
    _keys_values: tuple[torch.Tensor, torch.Tensor] | None = None

    def __getitem__(self, layer: int) -> int:
        """Stands for the step's list of layers: a layer's cache is its index."""
        self.calls.append(layer)
        return layer

    def __bool__(self) -> bool:
        return False

    def write(self, kv: Any, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self._keys_values = key, value

    def chunk(
        self,
        query: torch.Tensor,
        kv: Any,
        block_table: torch.Tensor,
        context: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        key, value = self._keys_values
        self.specs[kv] = LayerSpec(
            num_kv_heads=key.shape[1],
            head_dim=key.shape[2],
            value_dim=value.shape[2],
            window=window,
        )
        return value.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def observe_layers(model: TokenModel) -> tuple[LayerSpec, ...]:
    """What each layer keeps, by `layer_idx`. `model.num_layers` says how many there must be.

    Raises `UnsupportedCombinationError` when a layer does not attend through the interface, does
    it twice or out of order, asks for what paged attention does not do, or sees other keys than it
    says.
    """
    recorder = _Recorder()
    sequence = _sequences(model)[0]
    chunk = Chunk(sequence=sequence, start=0, count=len(sequence.token_ids), first=0)
    device = _device(model)
    step = PagedStep(
        num_decodes=0,
        slots=torch.arange(chunk.count, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        context_lens=torch.tensor([chunk.count], dtype=torch.int32, device=device),
        chunk_lens=(chunk.count,),
        chunk_contexts=(chunk.count,),
        kv=recorder,
        backend=recorder,
    )
    with torch.inference_mode():
        model.begin(sequence)
        try:
            with _refused_if_it_fails(model):
                _forward(model, step, [chunk])
        finally:
            model.release(sequence)
    _check_calls(model, recorder.calls)
    specs = tuple(recorder.specs[index] for index in range(len(recorder.calls)))
    _check_windows(model, specs)
    return specs


def _check_calls(model: Any, calls: list[int]) -> None:
    expected = list(range(model.num_layers))
    if calls == expected:
        return
    missing = sorted(set(expected) - set(calls))
    repeated = sorted({index for index in calls if calls.count(index) > 1})
    if missing:
        what = f"layers {_some(missing)} of {len(expected)} never call the attention interface"
    elif repeated:
        what = f"layers {_some(repeated)} call it more than once a forward"
    else:
        what = f"its layers call it in the order {_some(calls)}"
    raise _refusal(model, what)


def _check_windows(model: Any, specs: Sequence[LayerSpec]) -> None:
    types = getattr(model, "layer_types", None)
    for index, (kind, spec) in enumerate(zip(types or (), specs, strict=False)):
        if kind not in ("full_attention", "sliding_attention"):
            raise _refusal(model, f"layer {index} is of type {kind!r}")
        if kind == "sliding_attention" and spec.window is None:
            raise _refusal(model, f"layer {index} slides, but does not tell attention its window")


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return shown + (", …" if len(numbers) > 6 else "")


def _refusal(model: TokenModel, what: str) -> UnsupportedCombinationError:
    return UnsupportedCombinationError(
        f"{type(model.module).__name__} cannot be served by the token runtime: {what}; its tokens "
        "would be wrong in a batch, so it is refused"
    )


@contextmanager
def library_attention(module: torch.nn.Module) -> Iterator[None]:
    """Parts of `module` that attend by pages attend as the library has it inside."""
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    sdpa = getattr(module, "_supports_sdpa", False)
    try:
        for config, name in before:
            if name == NAME:
                config._attn_implementation = "sdpa" if sdpa else "eager"
        yield
    finally:
        for config, name in before:  # A config also sets those inside it: outer ones come first.
            config._attn_implementation = name


@contextmanager
def _refused_if_it_fails(model: TokenModel) -> Iterator[None]:
    try:
        yield
    except OmniError:
        raise
    except Exception as error:
        what = f"calling it fails with {type(error).__name__}: {error}"
        raise _refusal(model, what) from error


@torch.inference_mode()
def reference_logits(model: TokenModel) -> list[torch.Tensor]:
    """(T, vocab_size) float32 of each probe sequence alone, by the module with its own attention.
    Take it before anything changes the module."""
    own = getattr(model, "reference_logits", None)
    found = []
    with library_attention(model.module):
        for sequence in _sequences(model):
            if own is not None:
                found.append(own(sequence.token_ids).float())
                continue
            chunk = Chunk(sequence=sequence, start=0, count=len(sequence.token_ids), first=0)
            model.begin(sequence)
            try:
                hidden = _forward(model, None, [chunk])
                found.append(model.logits(hidden).float())
            finally:
                model.release(sequence)
    return found


@torch.inference_mode()
def check_packed(
    model: TokenModel, reference: Sequence[torch.Tensor], backend: PagedBackend, dtype: torch.dtype
) -> float:
    """The largest deviation from `reference_logits`, as a fraction of the logits' magnitude.

    Raises `UnsupportedCombinationError` when it is more than rounding.
    """
    with _refused_if_it_fails(model):
        packed = _packed_logits(model, backend, dtype)
    worst = 0.0
    for expected, found in zip(reference, packed, strict=True):
        known = expected.isfinite() & found.isfinite()
        if not torch.equal(expected.isfinite(), found.isfinite()) or not known.any():
            raise _refusal(model, "packed sequences give logits that are no numbers")
        difference = (expected - found)[known].square().mean().sqrt()
        worst = max(worst, float(difference / expected[known].square().mean().sqrt()))
    allowed = TOLERANCES[dtype]
    if not worst <= allowed:
        raise _refusal(
            model,
            f"packed sequences differ from separate ones by {worst:.2g} of the logits' magnitude "
            f"(allowed: {allowed:g})",
        )
    return worst


def _packed_logits(
    model: TokenModel, backend: PagedBackend, dtype: torch.dtype
) -> list[torch.Tensor]:
    sequences = _sequences(model)
    width = -(-max(LENGTHS) // BLOCK_SIZE)
    plan = CachePlan(
        num_blocks=1 + width * len(sequences),
        block_size=BLOCK_SIZE,
        max_model_len=max(LENGTHS),
        token_bytes=0,
    )
    cache = KVCache(plan, model.layers, {}, dtype=dtype, device=str(_device(model)))
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for sequence in sequences:
        model.begin(sequence)
    try:
        for step in STEPS:
            ordered = sorted(step, key=lambda part: part[2] > 1)
            chunks = _chunks(sequences, ordered)
            paged = _paged_step(chunks, cache.layers, backend, _device(model), width)
            logits = model.logits(_forward(model, paged, chunks)).float()
            for (index, _, count), chunk in zip(ordered, chunks, strict=True):
                parts[index].append(logits[chunk.first : chunk.first + count])
    finally:
        for sequence in sequences:
            model.release(sequence)
    return [torch.cat(found) for found in parts]


@torch.inference_mode()
def run_widest(
    model: TokenModel, backend: PagedBackend, dtype: torch.dtype, tokens: int, samples: int
) -> None:
    """One chunk of `tokens` (or the model's longest sequence), logits of `samples` positions."""
    tokens = min(tokens, model.max_model_len)
    sequence = _sequences(model, (tokens,))[0]
    width = -(-tokens // BLOCK_SIZE)
    plan = CachePlan(
        num_blocks=1 + width, block_size=BLOCK_SIZE, max_model_len=tokens, token_bytes=0
    )
    cache = KVCache(plan, model.layers, {}, dtype=dtype, device=str(_device(model)))
    chunk = Chunk(sequence=sequence, start=0, count=tokens, first=0)
    model.begin(sequence)
    try:
        step = _paged_step([chunk], cache.layers, backend, _device(model), width)
        model.logits(_forward(model, step, [chunk])[:samples])
    finally:
        model.release(sequence)


def _sequences(model: Any, lengths: Sequence[int] = LENGTHS) -> list[RunningSequence]:
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


def _chunks(
    sequences: Sequence[RunningSequence], parts: Sequence[tuple[int, int, int]]
) -> list[Chunk]:
    chunks, first = [], 0
    for index, start, count in parts:
        chunks.append(Chunk(sequence=sequences[index], start=start, count=count, first=first))
        first += count
    return chunks


def _paged_step(
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


def _forward(model: TokenModel, step: PagedStep | None, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Hidden states (T, hidden_size). `step` None: the module attends by itself."""
    device = _device(model)
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
    kinds = (p.dtype for p in model.module.parameters() if p.dtype in TOLERANCES)
    return next(kinds)


def _device(model: TokenModel) -> torch.device:
    return next(model.module.parameters()).device
