"""The processor as a device: always there, streams and events are trivial."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from omnistage.contracts.errors import ConfigurationError
from omnistage.platforms import host_memory
from omnistage.platforms.attention_probe import usable_attention_kernels
from omnistage.platforms.base import (
    Capabilities,
    CapturedGraph,
    DeviceInfo,
    MemoryStats,
    Platform,
    parse_device,
)


class CpuEvent:
    """Work on a CPU is done when its call returns, so an event has happened once recorded."""

    def __init__(self) -> None:
        self._recorded_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds. Raises `RuntimeError` when one of the two was not recorded."""
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise RuntimeError("both events must be recorded before their distance is known")
        return (end_event._recorded_ns - self._recorded_ns) / 1e6


class CpuStream:
    """All work runs at once and in order."""

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuPlatform(Platform):
    """See `Platform`. Memory is the host's, bounded by the container's limit."""

    device_type = "cpu"

    def devices(self) -> tuple[DeviceInfo, ...]:
        info = DeviceInfo(
            name="cpu",
            index=0,
            label=host_memory.cpu_label(),
            total_bytes=host_memory.total_bytes(),
            free_bytes=host_memory.free_bytes(),
        )
        return (info,)

    def validate_device(self, device: str) -> str:
        kind, index = parse_device(device)
        if kind != "cpu" or index not in (None, 0):
            raise ConfigurationError(f"no CPU device {device!r}; the only one is cpu")
        return "cpu"

    def default_dtype(self, device: str) -> str:
        return "float32"

    def stream(self, device: str) -> CpuStream:
        return CpuStream()

    def current_stream(self, device: str) -> CpuStream:
        return CpuStream()

    def stream_scope(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self, device: str, *, timing: bool = False) -> CpuEvent:
        return CpuEvent()

    def synchronize(self, device: str) -> None:
        pass

    def graph_pool(self, device: str) -> Any:
        raise ConfigurationError(f"{self.graphs_unavailable_reason()}; turn graphs off")

    def capture_graph(
        self, device: str, work: Callable[[], Any], *, pool: Any, stream: Any
    ) -> tuple[CapturedGraph, Any]:
        raise ConfigurationError(f"{self.graphs_unavailable_reason()}; turn graphs off")

    def offload_unavailable_reason(self) -> str | None:
        return "on a CPU host and device memory are the same"

    def memory_stats(self, device: str) -> MemoryStats:
        resident_bytes = host_memory.resident_bytes()
        return MemoryStats(
            allocated_bytes=resident_bytes,
            reserved_bytes=resident_bytes,
            peak_bytes=host_memory.peak_resident_bytes(),
            free_bytes=host_memory.free_bytes(),
            total_bytes=host_memory.total_bytes(),
        )

    def peak_memory_mb(self, device: str, *, reset: bool = False) -> float:
        """Of the whole process. Where the system cannot reset, the peak since its start."""
        peak_mb = host_memory.peak_resident_bytes() / 1e6
        if reset:
            host_memory.reset_peak()
        return peak_mb

    def empty_cache(self, device: str) -> None:
        pass

    def capabilities(self, device: str) -> Capabilities:
        return Capabilities(
            device=self.validate_device(device),
            label=host_memory.cpu_label(),
            compute_capability=None,
            attention_kernels=usable_attention_kernels("cpu", "float32"),
            triton=None,
            bfloat16=True,
            float8=False,
        )


def set_cpu_threads(count: int) -> None:
    """Let torch use `count` threads for one operation in this process.

    One and two threads differ in the last bits for some models: runs to be compared need the same.
    """
    if count < 1:
        raise ConfigurationError(f"the number of CPU threads is {count}; it must be at least 1")
    import torch

    torch.set_num_threads(count)
