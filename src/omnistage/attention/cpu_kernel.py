"""Compiles `paged_cpu.cpp` with the machine's own compiler, once a machine, and calls it.

The library is kept in a cache folder under a name made of the source, the compiler and the CPU.
It uses the OpenMP threads that torch has loaded (both ask for the same libgomp).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from omnistage.observability.logging import get_logger

logger = get_logger(__name__)

SOURCE = Path(__file__).with_name("paged_cpu.cpp")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
COMPILERS = ("g++", "c++")
COMPILE_TIMEOUT_S = 120.0
HEAD_DIMS, MAX_GROUP = (16, 32, 64, 80, 96, 128, 256), 32
"""As in the source."""

DecodeKernel = Any
"""The function of the library, by ctypes."""


@functools.cache
def decode_kernel() -> DecodeKernel | None:
    """The kernel, compiled if it is not in the cache; None, with the reason logged, where that
    cannot be done."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.warning(
            "attention of decode steps runs by torch's own operators, about twice slower: "
            "no C++ compiler is installed (%s)",
            " or ".join(COMPILERS),
        )
        return None
    try:
        return load(compiler, cache_folder())
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        logger.warning(
            "attention of decode steps runs by torch's own operators, about twice slower: "
            "the kernel cannot be compiled or loaded: %s",
            str(said).strip()[:500],
        )
        return None


def load(compiler: str, folder: Path) -> DecodeKernel:
    """Raises `OSError` or `subprocess.SubprocessError`."""
    library = folder / f"paged_cpu-{_fingerprint(compiler)}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            target = Path(made) / library.name
            command = [compiler, *FLAGS, "-o", str(target), str(SOURCE)]
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
            )
            target.replace(library)  # Another process may do the same: whole or not at all.
    function = ctypes.CDLL(str(library)).omnistage_paged_decode
    pointer = ctypes.c_void_p
    function.argtypes = [pointer] * 7 + [ctypes.c_float] * 2 + [ctypes.c_int] * 2
    function.restype = ctypes.c_int
    return function


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "omnistage"


def usable(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel takes query (rows, heads, dim) over keys and values by block."""
    group = query.shape[1] // keys.shape[2]
    return (
        query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype == keys.dtype == values.dtype
        and query.stride(2) == 1
        and keys.shape[3] == values.shape[3]
        and keys.shape[3] in HEAD_DIMS
        and group <= MAX_GROUP
    )


def decode(
    kernel: DecodeKernel,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """query (rows, heads, dim), keys and values (num_blocks, block_size, kv_heads, dim),
    tables (rows, width) and contexts (rows,) int32, all contiguous but the query → (rows, heads,
    dim). They must be `usable`."""
    rows, heads, dim = query.shape
    _, block_size, kv_heads, _ = keys.shape
    out = query.new_empty(rows, heads, dim)
    sizes = (ctypes.c_int64 * 9)(
        dim,
        rows,
        heads,
        kv_heads,
        block_size,
        tables.shape[1],
        query.stride(0),
        query.stride(1),
        window or 0,
    )
    unknown = kernel(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        tables.data_ptr(),
        contexts.data_ptr(),
        out.data_ptr(),
        sizes,
        scale,
        softcap or 0.0,
        query.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    assert not unknown, f"no code for heads of {dim}"
    return out


def _fingerprint(compiler: str) -> str:
    """Of everything that the library depends on."""
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=10
    ).stdout
    what = [SOURCE.read_text(), *FLAGS, compiler, version, _cpu_features()]
    return hashlib.sha256("\n".join(what).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """What `-march=native` reads: one line of Linux's, elsewhere the machine's name."""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = cpu.read_text().splitlines()
        return "\n".join(
            next((line for line in lines if line.startswith(name)), "")
            for name in ("model name", "flags", "Features")
        )
    return " ".join(os.uname())
