"""Which accelerators this process may use, found without importing torch.

The engine and the command line resolve placement before any process that needs torch exists.
"""

from __future__ import annotations

import ctypes
import os
from importlib import metadata

_NVML_LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")


def visible_accelerators() -> tuple[str, ...]:
    """Names as torch would number them, ("cuda:0", "cuda:1"); empty without a driver, or where the
    installed torch is built for the CPU only."""
    if torch_is_cpu_only():
        return ()
    count = _visible_count(os.environ.get("CUDA_VISIBLE_DEVICES"), nvidia_device_count())
    return tuple(f"cuda:{index}" for index in range(count))


def torch_is_cpu_only() -> bool:
    """By the local part of its version: "2.11.0+cpu"."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True


def nvidia_device_count() -> int:
    """What the driver's management library reports; 0 when there is no driver."""
    for name in _NVML_LIBRARIES:
        try:
            nvml = ctypes.CDLL(name)
        except OSError:
            continue
        if nvml.nvmlInit_v2() != 0:
            return 0
        count = ctypes.c_uint(0)
        status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
        return count.value if status == 0 else 0
    return 0


def _visible_count(visible: str | None, present: int) -> int:
    """CUDA_VISIBLE_DEVICES counts up to its first entry that names no device."""
    if visible is None:
        return present
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if name.isdecimal() and int(name) >= present:
            break
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count if present else 0
