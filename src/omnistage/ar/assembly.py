"""A loaded token model with all that runs it: gate passed, cache sized, buffers made."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from omnistage.ar import gate, gate_probe
from omnistage.ar.cpu_weights import join_and_pack
from omnistage.ar.graphs import DecodeGraphs, graph_sizes
from omnistage.ar.kv_cache import DeviceMemory, KVCache, cache_bytes, plan_cache, token_bytes
from omnistage.ar.model import TokenModel
from omnistage.ar.options import TokenOptions
from omnistage.ar.payloads import HostCopier
from omnistage.ar.running import SequenceTable
from omnistage.ar.sampling.row_state import SamplerState
from omnistage.ar.sampling.sampler import Sampler
from omnistage.ar.step_clock import StepClock
from omnistage.ar.step_input import DecodeInput
from omnistage.ar.step_runner import StepRunner
from omnistage.ar.warm_up import warm_up
from omnistage.attention.cpu_kernel import decode_kernel
from omnistage.attention.paged import PagedBackend
from omnistage.attention.paged_torch import TorchPagedBackend
from omnistage.contracts.runtime import LoadReporter
from omnistage.platforms.registry import platform_of


@dataclass(slots=True, kw_only=True, eq=False)
class Assembly:
    """`notes` are for the stage's description."""

    model: TokenModel
    device: str
    dtype: torch.dtype
    cache: KVCache
    runner: StepRunner
    sequences: SequenceTable
    copier: HostCopier
    clock: StepClock
    graphs: DecodeGraphs | None
    notes: dict[str, Any] = field(default_factory=dict)

    def describe_graphs(self) -> dict[str, Any]:
        return {} if self.graphs is None else self.graphs.describe()


def assemble(
    model: TokenModel, options: TokenOptions, device: str, report: LoadReporter
) -> Assembly:
    """Raises `UnsupportedCombinationError` for a model that the gate refuses, `ConfigurationError`
    for a cache that does not fit."""
    backend = make_backend(device, fast=options.fuse_layers)
    dtype = gate_probe.dtype_of(model)
    report("trying packed batches", None)
    reference = gate.reference_logits(model)
    notes = prepare_weights(model, options, device, dtype)
    notes["packed_deviation"] = gate.check_packed(model, reference, backend, dtype)
    del reference
    memory = measure(model, backend, options, device, dtype) if device != "cpu" else None
    plan = plan_cache(
        options,
        bytes_per_token=token_bytes(model.layers, model.states, dtype),
        model_limit=model.max_model_len,
        budget_bytes=cache_bytes(options, memory),
    )
    report(f"making a KV cache of {(plan.num_blocks - 1) * plan.block_size} tokens", None)
    cache = KVCache(plan, model.layers, model.states, dtype=dtype, device=device)
    step_input = DecodeInput(
        max_num_seqs=options.max_num_seqs,
        position_rows=model.position_rows,
        table_width=plan.table_width,
        vocab_size=model.vocab_size,
        device=device,
    )
    state = SamplerState(options.max_num_seqs, model.vocab_size, device)
    runner = StepRunner(
        model, cache, backend, step_input, Sampler(state), payloads=options.emits_payload
    )
    sequences = SequenceTable(model, state, step_input, max_num_seqs=options.max_num_seqs)
    graphs = capture_decoding(runner, options, device, report)
    if graphs is not None:
        notes |= graphs.describe()
    if device != "cpu":
        with torch.inference_mode():
            warm_up(runner, sequences, options, report)
    return Assembly(
        model=model,
        device=device,
        dtype=dtype,
        cache=cache,
        runner=runner,
        sequences=sequences,
        copier=HostCopier(device),
        clock=StepClock(device),
        graphs=graphs,
        notes=notes,
    )


def make_backend(device: str, *, fast: bool = True) -> PagedBackend:
    """Kernels of our own where there is a compiler for them; on a CPU only if `fast`."""
    if device == "cpu":
        return TorchPagedBackend(kernel=decode_kernel() if fast else None)
    if find_spec("triton") is None:
        return TorchPagedBackend()
    from omnistage.attention.triton_backend import TritonPagedBackend

    return TritonPagedBackend.on(device)


def prepare_weights(
    model: TokenModel, options: TokenOptions, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Module surgery that keeps the mathematics, where `fuse_layers` allows it."""
    if not options.fuse_layers:
        return {}
    if device == "cpu":
        return join_and_pack(model)
    if options.enforce_eager:
        return {}
    from omnistage.ar.surgery import fuse_for_gpu

    return fuse_for_gpu(model)


def capture_decoding(
    runner: StepRunner, options: TokenOptions, device: str, report: LoadReporter
) -> DecodeGraphs | None:
    """Let decode steps run by captured graphs, where the device has them."""
    platform = platform_of(device)
    if options.enforce_eager or platform.graphs_unavailable_reason() is not None:
        return None
    sizes = graph_sizes(options.max_num_seqs)
    graphs = DecodeGraphs(runner.run_decode, platform, device, sizes)
    step_input = runner.step_input
    step_input.fixed_width = True
    with torch.inference_mode():
        step_input.fill([], sizes[-1])
        graphs.capture(report)
    runner.decode_forward, runner.padded = graphs, graphs.padded
    runner.splits_mixed = True
    return graphs


def measure(
    model: TokenModel,
    backend: PagedBackend,
    options: TokenOptions,
    device: str,
    dtype: torch.dtype,
) -> DeviceMemory:
    """Run the widest step once, on a device that counts its allocations."""
    platform = platform_of(device)
    platform.peak_memory_mb(device, reset=True)
    before = platform.memory_stats(device).allocated_bytes
    gate_probe.run_widest(
        model, backend, dtype, options.max_num_batched_tokens, options.max_num_seqs
    )
    platform.synchronize(device)
    step_bytes = platform.memory_stats(device).peak_bytes - before
    platform.empty_cache(device)
    tensors = {t.data_ptr(): t for t in (*model.module.parameters(), *model.module.buffers())}
    stats = platform.memory_stats(device)
    return DeviceMemory(
        total_bytes=stats.total_bytes,
        free_bytes=stats.free_bytes or 0,
        weight_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
        step_bytes=step_bytes,
    )
