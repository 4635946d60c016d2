"""What the design of offloading rests on, measured: how fast host memory is made, page-locked,
hashed and copied to a GPU, by kind and by size of copy, and what a layer costs in FP8.

    python benchmarks/offload_mechanisms.py --save

Prints one JSON object. Needs a GPU, and 8 GiB of space in the folder for temporary files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.memory.host.mapping import MappedFile
from omnistage.platforms.base import Platform
from omnistage.platforms.registry import platform_of
from omnistage.quantization.fp8 import quantize_rows, scaled_rows

DEVICE = "cuda:0"
COPY_BYTES = (64 << 10, 1 << 20, 16 << 20, 128 << 20, 512 << 20)
THREADS = (1, 8, 16)
LAYERS = ((3072, 3072), (3072, 12288), (12288, 3072))


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--gib", type=int, default=8, help="bytes of each region (%(default)s GiB)")
    flags.add_argument("--save", type=Path, help="write the result here too")
    args = flags.parse_args()
    torch.set_grad_enabled(False)
    nbytes = args.gib << 30
    found: dict[str, Any] = {
        "benchmark": "offload_mechanisms",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "host_threads": torch.get_num_threads(),
        "anonymous_memory": anonymous(nbytes),
        "mapped_file": mapped_file(nbytes),
        "layers_ms": layers(),
    }
    text = json.dumps(found)
    if args.save:
        args.save.write_text(text + "\n")
    print(text)
    return 0


def anonymous(nbytes: int) -> dict[str, float]:
    """Private memory: an untouched page costs more to lock than to fill and lock."""
    platform = platform_of(DEVICE)
    fresh = _anonymous(nbytes)
    lock_untouched_s = _lock_s(platform, fresh, read_only=False)
    platform.unlock_pages(fresh.data_ptr(), DEVICE)
    region, source = _anonymous(nbytes), torch.ones(nbytes, dtype=torch.uint8)
    pageable_s = _seconds(lambda: region.copy_(source))
    lock_s = _lock_s(platform, region, read_only=False)
    target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    locked = _device_s(lambda: target.copy_(region, non_blocking=True))
    platform.unlock_pages(region.data_ptr(), DEVICE)
    return {
        "fill_gb_s": _rate(nbytes, pageable_s),
        "lock_filled_gb_s": _rate(nbytes, lock_s),
        "lock_untouched_gb_s": _rate(nbytes, lock_untouched_s),
        "upload_gb_s": _rate(nbytes, locked),
    }


def mapped_file(nbytes: int) -> dict[str, Any]:
    """Pages of a file, mapped read-only, as a checkpoint's are."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.bin"
        chunk = os.urandom(64 << 20)
        with path.open("wb") as stream:
            for _ in range(nbytes // len(chunk)):
                stream.write(chunk)
        mapped = MappedFile(path)
        try:
            return _of_mapped(platform_of(DEVICE), mapped.bytes, nbytes)
        finally:
            mapped.close()


def _of_mapped(platform: Platform, data: torch.Tensor, nbytes: int) -> dict[str, Any]:
    target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    unlocked = _device_s(lambda: target.copy_(data))
    found: dict[str, Any] = {
        "upload_unlocked_gb_s": _rate(nbytes, unlocked),
        "lock_gb_s": _rate(nbytes, _lock_s(platform, data, read_only=True)),
        "upload_gb_s": _rate(nbytes, _device_s(lambda: target.copy_(data, non_blocking=True))),
        "upload_gb_s_by_copy_bytes": {
            str(size): _copies(target, data, size) for size in COPY_BYTES
        },
        "sha256_gb_s_by_threads": {str(count): _hash(data, count) for count in THREADS},
    }
    platform.unlock_pages(data.data_ptr(), DEVICE)
    return found


def layers() -> dict[str, dict[str, float]]:
    """Milliseconds of a linear layer over 4,352 tokens, by its weight's shape (in x out)."""
    return {f"{k}x{n}": _layer(4352, k, n) for k, n in LAYERS}


def _layer(rows: int, k: int, n: int) -> dict[str, float]:
    x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
    q, scale = quantize_rows(weight)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        x_q, x_scale = scaled_rows(x)
        return torch._scaled_mm(
            x_q, q.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=torch.bfloat16
        )

    def dequantized(x: torch.Tensor) -> torch.Tensor:
        return x @ (q.to(torch.bfloat16) * scale.to(torch.bfloat16)).t()

    compiled = {name: torch.compile(one) for name, one in (("s", scaled), ("d", dequantized))}
    return {
        "bf16": _device_s(lambda: x @ weight.t()) * 1e3,
        "fp8_compute": _device_s(lambda: compiled["s"](x)) * 1e3,
        "fp8_weights_bf16_compute": _device_s(lambda: compiled["d"](x)) * 1e3,
    }


def _anonymous(nbytes: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8))


def _lock_s(platform: Platform, region: torch.Tensor, *, read_only: bool) -> float:
    return _seconds(
        lambda: platform.lock_pages(region.data_ptr(), region.numel(), DEVICE, read_only=read_only)
    )


def _copies(target: torch.Tensor, data: torch.Tensor, size: int) -> float:
    count = min(2000, data.numel() // size)

    def work() -> None:
        for start in range(0, count * size, size):
            part = slice(start, start + size)
            target[part].copy_(data[part], non_blocking=True)

    return _rate(count * size, _device_s(work))


def _hash(data: torch.Tensor, threads: int) -> float:
    raw = memoryview(data[: 2 << 30].numpy())
    parts = [raw[start : start + (32 << 20)] for start in range(0, len(raw), 32 << 20)]
    with ThreadPoolExecutor(threads) as pool:
        hashes = lambda: list(pool.map(lambda part: hashlib.sha256(part).digest(), parts))  # noqa: E731
        return _rate(len(raw), _seconds(hashes))


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _device_s(work: Callable[[], Any], rounds: int = 5) -> float:
    work()
    taken = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def _rate(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)


if __name__ == "__main__":
    sys.exit(main())
