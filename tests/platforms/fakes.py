"""A second kind of device, made of host memory, for tests of placement."""

from __future__ import annotations

from omnistage.platforms.base import Capabilities, DeviceInfo, MemoryStats, Platform
from omnistage.platforms.cpu import CpuPlatform

GIB = 2**30


class FakePlatform(CpuPlatform):
    """`count` devices "fake:0"…, each of `total_gib`; what they have free can be set."""

    device_type = "fake"

    def __init__(self, count: int = 2, total_gib: float = 8, reason: str | None = None) -> None:
        self.total_bytes = int(total_gib * GIB)
        self.free_bytes = [self.total_bytes] * count
        self.reason = reason

    def unavailable_reason(self) -> str | None:
        return self.reason

    def validate_device(self, device: str) -> str:
        return Platform.validate_device(self, device)

    def devices(self) -> tuple[DeviceInfo, ...]:
        if self.reason:
            return ()
        return tuple(
            DeviceInfo(
                name=f"fake:{index}",
                index=index,
                label="Fake",
                total_bytes=self.total_bytes,
                free_bytes=free_bytes,
                compute_capability=(9, 0),
            )
            for index, free_bytes in enumerate(self.free_bytes)
        )

    def default_dtype(self, device: str) -> str:
        return "bfloat16"

    def memory_stats(self, device: str) -> MemoryStats:
        free_bytes = self.free_bytes[self.device_info(device).index]
        used_bytes = self.total_bytes - free_bytes
        return MemoryStats(
            allocated_bytes=used_bytes,
            reserved_bytes=used_bytes,
            peak_bytes=used_bytes,
            free_bytes=free_bytes,
            total_bytes=self.total_bytes,
        )

    def capabilities(self, device: str) -> Capabilities:
        return Capabilities(
            device=self.validate_device(device),
            label="Fake",
            compute_capability=(9, 0),
            attention_kernels=("math",),
            triton=None,
            bfloat16=True,
            float8=True,
        )
