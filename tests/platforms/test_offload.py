"""What platforms do for offloading: page locks, uploads, bounds of memory. CUDA's runtime is played
by `FakeRuntime`, except where a test is marked `gpu`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from omnistage.contracts.errors import ConfigurationError
from omnistage.memory.host.mapping import MappedFile
from omnistage.platforms import cuda
from omnistage.platforms.base import PageLockError
from omnistage.platforms.cpu import CpuPlatform
from omnistage.platforms.cuda import CudaPlatform

CUDA, CPU = CudaPlatform(), CpuPlatform()

needs_a_card = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device that torch can use"
)


def test_a_cpu_has_nothing_to_offload_to() -> None:
    assert "the same" in str(CPU.offload_unavailable_reason())
    assert CUDA.offload_unavailable_reason() is None
    with pytest.raises(PageLockError, match="CPU devices lock no pages"):
        CPU.lock_pages(0, 4096, "cpu", read_only=False)
    with pytest.raises(PageLockError, match="CPU devices lock no pages"):
        CPU.unlock_pages(0, "cpu")
    with pytest.raises(ConfigurationError, match="cannot be bounded"):
        CPU.limit_memory("cpu", 1)


def test_an_upload_copies_all_of_it() -> None:
    source = torch.arange(8)
    destination = torch.zeros(8, dtype=torch.int64)
    CPU.upload(destination, source)
    assert torch.equal(destination, source)


class FakeRuntime:
    """Of CUDA, as far as page locks need it: refuses pages that are locked."""

    def __init__(self) -> None:
        self.locked: dict[int, tuple[int, int]] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if address in self.locked:
            self.last_error = 712
        else:
            self.locked[address] = (nbytes, flags)
        return self.last_error

    def cudaHostUnregister(self, address: int) -> int:
        self.last_error = 0 if self.locked.pop(address, None) else 713
        return self.last_error

    def cudaGetErrorString(self, status: int) -> str:
        return f"reason {status}"

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "_cuda_runtime", lambda: fake)
    return fake


def test_pages_are_locked_for_all_devices_and_read_only_where_they_are(
    runtime: FakeRuntime,
) -> None:
    CUDA.lock_pages(4096, 8192, "cuda:0", read_only=False)
    CUDA.lock_pages(16384, 4096, "cuda:0", read_only=True)
    assert runtime.locked == {4096: (8192, 0x01), 16384: (4096, 0x01 | 0x08)}
    CUDA.unlock_pages(4096, "cuda:0")
    assert list(runtime.locked) == [16384]


def test_a_refused_page_lock_leaves_no_error_behind(runtime: FakeRuntime) -> None:
    CUDA.lock_pages(4096, 8192, "cuda:0", read_only=False)
    with pytest.raises(PageLockError, match="cudaHostRegister of 4096 bytes failed: reason 712"):
        CUDA.lock_pages(4096, 4096, "cuda:0", read_only=False)
    assert runtime.last_error == 0
    with pytest.raises(PageLockError, match="cudaHostUnregister failed: reason 713"):
        CUDA.unlock_pages(8192, "cuda:0")
    assert runtime.last_error == 0


@pytest.mark.gpu
@needs_a_card
def test_page_locks_of_a_card(tmp_path: Path) -> None:
    device = CUDA.default_device()
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 4096)
    memory = MappedFile(path)
    CUDA.lock_pages(memory.address, memory.nbytes, device, read_only=True)
    with pytest.raises(PageLockError, match="already mapped"):
        CUDA.lock_pages(memory.address, 4096, device, read_only=True)
    destination = torch.zeros(memory.nbytes, dtype=torch.uint8, device=device)
    CUDA.upload(destination, memory.bytes)
    assert torch.equal(destination.cpu(), memory.bytes)
    CUDA.unlock_pages(memory.address, device)
    with pytest.raises(PageLockError):
        CUDA.unlock_pages(memory.address, device)
    assert float(torch.ones(4, device=device).sum()) == 4.0


@pytest.mark.gpu
@needs_a_card
def test_memory_of_a_card_is_bounded() -> None:
    device = CUDA.default_device()
    CUDA.empty_cache(device)
    try:
        CUDA.limit_memory(device, CUDA.memory_stats(device).reserved_bytes + 64 * 2**20)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    finally:
        CUDA.limit_memory(device, None)
    torch.empty(256 * 2**20, dtype=torch.uint8, device=device)


def test_a_bound_of_memory_is_a_fraction_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    seen: list[float] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: seen.append(fraction),
    )
    for limit_bytes in (250, 4000, None):
        CUDA.limit_memory("cuda:0", limit_bytes)
    assert seen == [0.25, 1.0, 1.0]
