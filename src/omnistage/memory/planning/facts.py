"""What a plan needs to know of a device and its host: measured where there is one, else assumed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnistage.platforms.base import Platform

CONTEXT_BYTES = 640 * 2**20
"""What a process takes of a GPU outside of torch's allocator: the device context and kernels that
are loaded on first use. Left free where the budget is the device's free memory."""

FLOAT8_FROM = (8, 9)

HOST_OP_S = 19e-6
"""To start one operation of a library's module on a GPU, its Python included. Measured with the
denoiser of Qwen-Image at 512x512: 104 ms for 5,440 operations."""

STAGED_SHARE = 0.16
"""Rate of copies from memory that is not page-locked over that from memory that is: 8.9 of 55.5
GB/s, measured on an H200."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a kind of device reaches on large work, in bfloat16."""

    matmul_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    float32_share: float = 1 / 14
    """Of these rates, in float32 without TF32."""


H200 = Rates(
    matmul_flops_per_s=786e12,
    attention_flops_per_s=700e12,
    memory_bytes_per_s=4.265e12,
    link_bytes_per_s=55.5e9,
)
"""Measured; of all others it is assumed that they reach the same share of their data sheet."""

KNOWN_RATES = {
    "H200": H200,
    "H100": Rates(
        matmul_flops_per_s=786e12,
        attention_flops_per_s=700e12,
        memory_bytes_per_s=2.98e12,
        link_bytes_per_s=55.5e9,
    ),
    "A100": Rates(
        matmul_flops_per_s=248e12,
        attention_flops_per_s=190e12,
        memory_bytes_per_s=1.7e12,
        link_bytes_per_s=25e9,
    ),
    "L40S": Rates(
        matmul_flops_per_s=287e12,
        attention_flops_per_s=220e12,
        memory_bytes_per_s=0.77e12,
        link_bytes_per_s=25e9,
    ),
    "RTX 4090": Rates(
        matmul_flops_per_s=131e12,
        attention_flops_per_s=110e12,
        memory_bytes_per_s=0.9e12,
        link_bytes_per_s=25e9,
    ),
}
OTHER_GPU = Rates(
    matmul_flops_per_s=100e12,
    attention_flops_per_s=75e12,
    memory_bytes_per_s=0.8e12,
    link_bytes_per_s=25e9,
)
CPU = Rates(
    matmul_flops_per_s=2e11,
    attention_flops_per_s=1e11,
    memory_bytes_per_s=2e10,
    link_bytes_per_s=1e10,
    float32_share=1.0,
)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """`free_bytes` is what a rank may take in all; `link_bytes_per_s` counts for page-locked
    memory, `staged_bytes_per_s` for any other. `host_op_s` is what the host needs to start an
    operation while the device works on others. `workspace_bytes` is what libraries take of torch's
    allocator once and keep; `float8`: whether the device multiplies such matrices itself."""

    device: str
    label: str
    total_bytes: int
    free_bytes: int
    host_free_bytes: int
    rates: Rates
    link_is_measured: bool = False
    locks_pages: bool = True
    host_op_s: float = 0.0
    workspace_bytes: int = 0
    float8: bool = False
    offload_unavailable_reason: str | None = None
    is_assumed: bool = False
    """Whether there is no such device here, and the plan is made as if there were."""

    @property
    def taken_bytes(self) -> int:
        """What a rank cannot have of the device."""
        least_bytes = CONTEXT_BYTES if self.is_assumed else 0
        return max(self.total_bytes - self.free_bytes, least_bytes)

    @property
    def link_bytes_per_s(self) -> float:
        return self.rates.link_bytes_per_s

    @property
    def staged_bytes_per_s(self) -> float:
        return self.rates.link_bytes_per_s * STAGED_SHARE


def rates_of(label: str) -> Rates:
    """By the device's name; of an unknown GPU cautious ones."""
    return next((rates for name, rates in KNOWN_RATES.items() if name in label), OTHER_GPU)


def find_facts(platform: Platform, device: str) -> DeviceFacts:
    """Of a device that is here. Rates are assumed by its name: nothing is measured. Of a CPU's
    memory all counts as free: weights there are mapped files, which the system drops at need."""
    from omnistage.platforms import host_memory

    info = platform.device_info(device)
    free_bytes = info.total_bytes if info.free_bytes is None else info.free_bytes
    if platform.device_type == "cpu":
        return DeviceFacts(
            device=device,
            label=info.label,
            total_bytes=info.total_bytes,
            free_bytes=info.total_bytes,
            host_free_bytes=free_bytes,
            rates=CPU,
            locks_pages=platform.offload_unavailable_reason() is None,
            offload_unavailable_reason=platform.offload_unavailable_reason(),
        )
    return DeviceFacts(
        device=device,
        label=info.label,
        total_bytes=info.total_bytes,
        free_bytes=max(0, free_bytes - CONTEXT_BYTES),
        host_free_bytes=host_memory.free_bytes() or host_memory.total_bytes(),
        rates=rates_of(info.label),
        workspace_bytes=library_workspace_bytes(info.compute_capability),
        host_op_s=HOST_OP_S,
        float8=(info.compute_capability or (0, 0)) >= FLOAT8_FROM,
        offload_unavailable_reason=platform.offload_unavailable_reason(),
    )


def assume_facts(
    *, memory_bytes: int, link_bytes_per_s: float | None, label: str, host_free_bytes: int
) -> DeviceFacts:
    """Of a GPU that is not here, with `memory_bytes` in all."""
    rates = rates_of(label)
    if link_bytes_per_s is not None:
        rates = replace(rates, link_bytes_per_s=link_bytes_per_s)
    return DeviceFacts(
        device="cuda:0",
        label=label,
        total_bytes=memory_bytes,
        free_bytes=max(0, memory_bytes - CONTEXT_BYTES),
        host_free_bytes=host_free_bytes,
        rates=rates,
        workspace_bytes=library_workspace_bytes((9, 0)),
        host_op_s=HOST_OP_S,
        float8=True,
        is_assumed=True,
    )


def library_workspace_bytes(compute_capability: tuple[int, int] | None) -> int:
    """Of cuBLAS, for one stream: torch's default, 32 MiB from Hopper on, before 8,320 KiB."""
    if compute_capability is None:
        return 0
    return 32 * 2**20 if compute_capability >= (9, 0) else 8320 * 2**10
