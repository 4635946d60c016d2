"""NVIDIA GPUs as their driver sees them: no torch, no device context, milliseconds.

Uses the CUDA driver API (libcuda), which honours CUDA_VISIBLE_DEVICES and counts as torch does,
and NVML for free memory, both part of every driver installation.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

_SUCCESS = 0
_NO_DEVICE = 100
_ATTRIBUTE_CAPABILITY_MAJOR = 75
_ATTRIBUTE_CAPABILITY_MINOR = 76
_TEXT_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class DriverDevice:
    index: int
    label: str
    pci_bus_id: str
    total_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class DriverProbe:
    """`problem` says why there are no devices."""

    devices: tuple[DriverDevice, ...] = ()
    problem: str | None = None


class _NvmlMemory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


@functools.cache
def probe_driver() -> DriverProbe:
    """The GPUs this process may use. The driver decides once a process, so does this."""
    library = _load("libcuda.so.1")
    if library is None:
        return DriverProbe(problem="no NVIDIA driver is installed")
    status = library.cuInit(0)
    if status == _NO_DEVICE:
        return DriverProbe(problem="no GPU is visible (look at nvidia-smi, CUDA_VISIBLE_DEVICES)")
    if status != _SUCCESS:
        return DriverProbe(problem=f"the NVIDIA driver does not start (cuInit error {status})")
    count = ctypes.c_int()
    _check(library.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    devices = tuple(_describe(library, index) for index in range(count.value))
    problem = None if devices else "no GPU is visible (look at CUDA_VISIBLE_DEVICES)"
    return DriverProbe(devices=devices, problem=problem)


def _describe(library: ctypes.CDLL, index: int) -> DriverDevice:
    device = ctypes.c_int()
    label = ctypes.create_string_buffer(_TEXT_BYTES)
    bus_id = ctypes.create_string_buffer(_TEXT_BYTES)
    total = ctypes.c_size_t()
    _check(library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    _check(library.cuDeviceGetName(label, _TEXT_BYTES, device), "cuDeviceGetName")
    _check(library.cuDeviceGetPCIBusId(bus_id, _TEXT_BYTES, device), "cuDeviceGetPCIBusId")
    _check(library.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    return DriverDevice(
        index=index,
        label=label.value.decode(),
        pci_bus_id=bus_id.value.decode(),
        total_bytes=total.value,
        compute_capability=(
            _attribute(library, device, _ATTRIBUTE_CAPABILITY_MAJOR),
            _attribute(library, device, _ATTRIBUTE_CAPABILITY_MINOR),
        ),
    )


def _attribute(library: ctypes.CDLL, device: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    status = library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    _check(status, "cuDeviceGetAttribute")
    return value.value


def free_bytes(pci_bus_id: str) -> int | None:
    """Memory of a GPU that no process uses; None where NVML is missing or does not say."""
    library = _load("libnvidia-ml.so.1")
    if library is None or library.nvmlInit_v2() != _SUCCESS:
        return None
    try:
        handle = ctypes.c_void_p()
        memory = _NvmlMemory()
        found = library.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(handle))
        if found != _SUCCESS:
            return None
        read = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return int(memory.free) if read == _SUCCESS else None
    finally:
        library.nvmlShutdown()


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _check(status: int, call: str) -> None:
    if status != _SUCCESS:
        raise RuntimeError(f"the NVIDIA driver's {call} failed with error {status}")
