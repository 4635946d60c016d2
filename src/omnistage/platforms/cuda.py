"""NVIDIA GPUs. Availability and the list of devices need neither torch nor a device context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from omnistage.platforms.attention_probe import usable_attention_kernels
from omnistage.platforms.base import (
    Capabilities,
    CapturedGraph,
    DeviceInfo,
    MemoryStats,
    PageLockError,
    Platform,
)
from omnistage.platforms.cuda_driver import DriverDevice, free_bytes, probe_driver
from omnistage.platforms.torch_build import package_version, torch_cuda_version, torch_version

BFLOAT16_FROM = (8, 0)
FLOAT8_FROM = (8, 9)

_REGISTER_PORTABLE = 0x01
_REGISTER_READ_ONLY = 0x08

_ABANDONED_GRAPHS: list[Any] = []
"""After a capture that CUDA refuses to end, torch's allocator goes on recording for the capturing
stream, with a pointer to the graph: use neither that stream nor that pool again."""


class CudaPlatform(Platform):
    """See `Platform`."""

    device_type = "cuda"

    def unavailable_reason(self) -> str | None:
        if torch_cuda_version() is None:
            return (
                f"the installed torch ({torch_version()}) is built without CUDA; install a CUDA "
                "build (https://pytorch.org/get-started)"
            )
        return probe_driver().problem

    def devices(self) -> tuple[DeviceInfo, ...]:
        if self.unavailable_reason():
            return ()
        return tuple(_info(device) for device in probe_driver().devices)

    def default_dtype(self, device: str) -> str:
        """bfloat16 from compute capability 8.0 on, float16 before."""
        capability = self.device_info(device).compute_capability or (0, 0)
        return "bfloat16" if capability >= BFLOAT16_FROM else "float16"

    def stream(self, device: str) -> Any:
        import torch

        return torch.cuda.Stream(device=device)

    def current_stream(self, device: str) -> Any:
        import torch

        return torch.cuda.current_stream(device)

    def stream_scope(self, stream: Any) -> AbstractContextManager[Any]:
        import torch

        scope: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return scope

    def adopt_stream(self, device: str, *, urgent: bool = False) -> None:
        import torch

        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1 if urgent else 0))

    def event(self, device: str, *, timing: bool = False) -> Any:
        """Belongs to the device of the stream that first records it."""
        import torch

        return torch.cuda.Event(enable_timing=timing)

    def synchronize(self, device: str) -> None:
        import torch

        torch.cuda.synchronize(device)

    def graphs_unavailable_reason(self) -> str | None:
        return None

    def graph_pool(self, device: str) -> Any:
        import torch

        return torch.cuda.graph_pool_handle()

    def capture_graph(
        self, device: str, work: Callable[[], Any], *, pool: Any, stream: Any
    ) -> tuple[CapturedGraph, Any]:
        """Only calls of the capturing thread are held to what can be captured ("thread_local"):
        another one may be copying results to the host meanwhile."""
        import torch

        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(device), torch.cuda.stream(stream):
            work()
            failure: BaseException | None = None
            try:
                with recording:
                    try:
                        result = work()
                    except BaseException as error:
                        failure = error
                        raise
            except BaseException as error:
                _ABANDONED_GRAPHS.append(graph)
                raise (failure or error) from None
        current.wait_stream(stream)
        return graph, result

    def lock_pages(self, address: int, nbytes: int, device: str, *, read_only: bool) -> None:
        """`cudaHostRegister`; the CUDA runtime asks for the read-only flag where a mapping is. No
        copy may cross from one locked range into another: CUDA refuses it."""
        import torch

        flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if read_only else 0)
        with torch.cuda.device(device):
            status = torch.cuda.cudart().cudaHostRegister(address, nbytes, flags)
        _check_page_lock(status, f"cudaHostRegister of {nbytes} bytes")

    def unlock_pages(self, address: int, device: str) -> None:
        import torch

        with torch.cuda.device(device):
            status = torch.cuda.cudart().cudaHostUnregister(address)
        _check_page_lock(status, "cudaHostUnregister")

    def limit_memory(self, device: str, limit_bytes: int | None) -> None:
        import torch

        total_bytes = torch.cuda.get_device_properties(device).total_memory
        fraction = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    def memory_stats(self, device: str) -> MemoryStats:
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return MemoryStats(
            allocated_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
            peak_bytes=torch.cuda.max_memory_allocated(device),
            free_bytes=free,
            total_bytes=total,
        )

    def peak_memory_mb(self, device: str, *, reset: bool = False) -> float:
        """Of torch's allocator in this process."""
        import torch

        peak_mb: float = torch.cuda.max_memory_allocated(device) / 1e6
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return peak_mb

    def empty_cache(self, device: str) -> None:
        import torch

        with torch.cuda.device(device):
            torch.cuda.empty_cache()

    def capabilities(self, device: str) -> Capabilities:
        info = self.device_info(device)
        capability = info.compute_capability or (0, 0)
        return Capabilities(
            device=info.name,
            label=info.label,
            compute_capability=info.compute_capability,
            attention_kernels=usable_attention_kernels(info.name, self.default_dtype(device)),
            triton=package_version("triton"),
            bfloat16=capability >= BFLOAT16_FROM,
            float8=capability >= FLOAT8_FROM,
        )


def _info(device: DriverDevice) -> DeviceInfo:
    return DeviceInfo(
        name=f"cuda:{device.index}",
        index=device.index,
        label=device.label,
        total_bytes=device.total_bytes,
        free_bytes=free_bytes(device.pci_bus_id),
        compute_capability=device.compute_capability,
    )


def _check_page_lock(status: Any, what: str) -> None:
    """CUDA keeps the error for the thread's next launch of a kernel, which has nothing to do with
    it; so it is taken away here."""
    import torch

    if int(status) == 0:
        return
    reason = torch.cuda.cudart().cudaGetErrorString(status)
    _cuda_runtime().cudaGetLastError()
    raise PageLockError(f"{what} failed: {reason}")


def _cuda_runtime() -> ctypes.CDLL:
    """The library that torch has loaded; its bindings lack a function."""
    import torch

    major = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
