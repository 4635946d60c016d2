"""Both sides of the offload benchmark: our loader and strategies on a denoiser, and diffusers'
block-level group offload on the same files."""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _offload_models import DenoiserShape
from torch._inductor import config as inductor_config

from omnistage.diffusion.compilation import CompiledBlocks
from omnistage.diffusion.fused_layers import FusedLayers
from omnistage.memory.host.mapping import AnonymousMemory
from omnistage.memory.host.page_lock import PageLocks, pages_of
from omnistage.memory.host.seams import WeightCache
from omnistage.memory.host.weight_plan import planned_layouts
from omnistage.memory.offload.base import OffloadBackend
from omnistage.memory.offload.discovery import streamable_blocks
from omnistage.memory.offload.factory import make_backend
from omnistage.memory.offload.host import HostBacking, HostWeights
from omnistage.memory.offload.residency import interleaved_residents
from omnistage.memory.pipeline_loader import PipelinePlan, load_pipeline
from omnistage.memory.placement import ComponentPlacement, Placement, Residency
from omnistage.platforms.base import Platform
from omnistage.quantization.config import resolve_quantization
from omnistage.quantization.convert import make_transforms

COMPONENT = "transformer"


@dataclass(kw_only=True)
class Ours:
    """A denoiser under one of our strategies, its layers fused as a stage fuses them. `setup_s`:
    from a plan, which has read headers only, to the first forward being possible."""

    module: torch.nn.Module
    backend: OffloadBackend
    weights: HostWeights | None
    setup_s: float

    def close(self) -> None:
        self.backend.disable()


def place(
    plan: PipelinePlan,
    residency: float,
    *,
    backing: HostBacking = HostBacking.CHECKPOINT,
    transforms: Mapping[str, Any] | None = None,
) -> Placement:
    """With that fraction of the blocks' bytes resident, spread evenly; 1.0 streams nothing."""
    module_plan = plan.modules[COMPONENT]
    paths = tuple(streamable_blocks(module_plan.skeleton.look(), COMPONENT))
    layouts = planned_layouts(module_plan, paths, (transforms or {}).get(COMPONENT))
    sizes = [layouts[path].nbytes for path in paths]
    resident = set(interleaved_residents(sizes, int(residency * sum(sizes))))
    streamed = tuple(path for index, path in enumerate(paths) if index not in resident)
    one = ComponentPlacement(
        component=COMPONENT,
        residency=Residency.STREAMED if streamed else Residency.RESIDENT,
        weight_bytes=module_plan.total_bytes,
        streamed_blocks=streamed,
        streamed_bytes=sum(layouts[path].nbytes for path in streamed),
        block_bytes=max(sizes),
    )
    strategy = "layerwise" if streamed else "none"
    return Placement(strategy=strategy, components={COMPONENT: one}, backing=backing)


def open_ours(
    plan: PipelinePlan,
    placement: Placement,
    platform: Platform,
    *,
    cache: WeightCache | None = None,
    transforms: Mapping[str, Any] | None = None,
) -> Ours:
    started = time.perf_counter()
    loaded = load_pipeline(plan, placement=placement, cache=cache, transforms=transforms)
    FusedLayers(device=plan.device, weights_move=placement.streams).install(
        loaded.pipeline.transformer
    )
    backend = make_backend(placement, loaded.host_weights, platform, plan.device)
    backend.enable(loaded.pipeline)
    platform.synchronize(plan.device)
    return Ours(
        module=loaded.pipeline.transformer,
        backend=backend,
        weights=loaded.host_weights.get(COMPONENT),
        setup_s=time.perf_counter() - started,
    )


def fp8_transforms(plan: PipelinePlan, platform: Platform, modulation: bool) -> dict[str, Any]:
    quantization = resolve_quantization(
        {"transformer": {"method": "fp8", "modulation": modulation}}
    )
    modules = {name: one.skeleton.look() for name, one in plan.modules.items()}
    float8 = platform.capabilities(plan.device).float8
    return make_transforms(quantization, modules, device=plan.device, float8=float8)


@contextmanager
def compiled(module: torch.nn.Module, *, on: bool) -> Iterator[None]:
    """Every compilation finds the same kernels: torch 2.11 times two sizes of a wide reduction
    anew each time, and which wins decides how sums are rounded (pytorch issue 189121)."""
    if not on:
        yield
        return
    blocks = CompiledBlocks(module)
    blocks.install()
    try:
        with inductor_config.patch(dynamic_scale_rblock=False):
            yield
    finally:
        blocks.close()


def forward(module: torch.nn.Module, inputs: Mapping[str, Any]) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with torch.no_grad():
            return module(**inputs, return_dict=False)[0]

    return run


def timed_s(platform: Platform, device: str, work: Callable[[], Any], rounds: int = 4) -> float:
    """Median seconds of one call, by the device's own clock where it has one.

    Calls follow each other without a pause, as steps do: in a pause, copies for the next call would
    go on and be counted nowhere.
    """
    stream = platform.current_stream(device)
    marks = [platform.event(device, timing=True) for _ in range(rounds + 1)]
    work()
    marks[0].record(stream)
    for mark in marks[1:]:
        work()
        mark.record(stream)
    platform.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


def peak_bytes(platform: Platform, device: str, work: Callable[[], Any]) -> int:
    platform.synchronize(device)
    platform.peak_memory_mb(device, reset=True)
    work()
    platform.synchronize(device)
    return int(platform.peak_memory_mb(device) * 1e6)


def link_rate(platform: Platform, device: str, nbytes: int, copy_bytes: int) -> float:
    """Bytes a second of bare copies of `copy_bytes` out of page-locked memory."""
    memory = AnonymousMemory(nbytes)
    memory.bytes.copy_(torch.zeros(nbytes, dtype=torch.uint8))
    locks = PageLocks.acquire(pages_of(memory, [memory.bytes]), platform, device, None)
    assert locks is not None, "page-locked memory was refused"
    target = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    starts = range(0, nbytes - copy_bytes + 1, copy_bytes)

    def work() -> None:
        for start in starts:
            platform.upload(target, memory.bytes[start : start + copy_bytes])

    rate = len(starts) * copy_bytes / min(timed_s(platform, device, work) for _ in range(3))
    locks.release()
    memory.close()
    return rate


@dataclass(kw_only=True)
class Peer:
    module: torch.nn.Module
    load_s: float
    offload_s: float


def open_peer(shape: DenoiserShape, folder: str, device: str) -> Peer:
    """diffusers' fastest: one block a group, a stream, pinned memory."""
    import diffusers
    from diffusers.hooks import apply_group_offloading

    started = time.perf_counter()
    cls: Any = getattr(diffusers, shape.cls)
    module = cls.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)
    loaded = time.perf_counter()
    apply_group_offloading(
        module,
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        record_stream=True,
        non_blocking=True,
    )
    return Peer(module=module, load_s=loaded - started, offload_s=time.perf_counter() - loaded)


def late_device() -> AbstractContextManager[Platform]:
    """The CPU that plays a device in tests, which are beside the benchmarks and not installed."""
    root = str(Path(__file__).parents[1])
    if root not in sys.path:
        sys.path.append(root)
    from tests.memory.offload import fake_device

    return fake_device.late_device()


def forget() -> None:
    """Memory of what was dropped goes back to the device and the host."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def difference(
    platform: Platform, device: str, out: torch.Tensor, reference: torch.Tensor
) -> float:
    """The largest, 0 for equal bits."""
    platform.synchronize(device)
    assert float(reference.float().std()) > 1e-3, "the reference output is near zero"
    if torch.equal(out, reference):
        return 0.0
    return float((out.float() - reference.float()).abs().max()) or float("nan")


seconds = functools.partial(round, ndigits=4)
