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
from omnistage.ar.gate_probe import (
    BLOCK_SIZE,
    LENGTHS,
    device_of,
    paged_step,
    probe_chunks,
    probe_sequences,
    run_forward,
)
from omnistage.ar.kv_cache import CachePlan, KVCache
from omnistage.ar.model import Chunk
from omnistage.attention.paged import NAME, PagedBackend, PagedStep
from omnistage.contracts.errors import OmniError, UnsupportedCombinationError

if TYPE_CHECKING:
    from omnistage.ar.model import TokenModel

STEPS = (((0, 0, 6), (1, 0, 7)), ((2, 0, 5), (0, 6, 4)), ((0, 10, 1), (2, 5, 7)), ((2, 12, 1),))
"""By step, (sequence, first position, count): chunks cut at odd places beside decode steps."""
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
    sequence = probe_sequences(model)[0]
    chunk = Chunk(sequence=sequence, start=0, count=len(sequence.token_ids), first=0)
    device = device_of(model)
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
                run_forward(model, step, [chunk])
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
        for sequence in probe_sequences(model):
            if own is not None:
                found.append(own(sequence.token_ids).float())
                continue
            chunk = Chunk(sequence=sequence, start=0, count=len(sequence.token_ids), first=0)
            model.begin(sequence)
            try:
                hidden = run_forward(model, None, [chunk])
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
    sequences = probe_sequences(model)
    width = -(-max(LENGTHS) // BLOCK_SIZE)
    plan = CachePlan(
        num_blocks=1 + width * len(sequences),
        block_size=BLOCK_SIZE,
        max_model_len=max(LENGTHS),
        token_bytes=0,
    )
    cache = KVCache(plan, model.layers, {}, dtype=dtype, device=str(device_of(model)))
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for sequence in sequences:
        model.begin(sequence)
    try:
        for step in STEPS:
            ordered = sorted(step, key=lambda part: part[2] > 1)
            chunks = probe_chunks(sequences, ordered)
            paged = paged_step(chunks, cache.layers, backend, device_of(model), width)
            logits = model.logits(run_forward(model, paged, chunks)).float()
            for (index, _, count), chunk in zip(ordered, chunks, strict=True):
                parts[index].append(logits[chunk.first : chunk.first + count])
    finally:
        for sequence in sequences:
            model.release(sequence)
    return [torch.cat(found) for found in parts]
