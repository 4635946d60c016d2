from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omnistage.contracts.errors import ConfigurationError
from omnistage.platforms import attention_probe, host_memory
from omnistage.platforms.cpu import CpuPlatform, set_cpu_threads

CPU = CpuPlatform()


def test_the_cpu_is_always_there() -> None:
    (info,) = CPU.devices()
    assert (info.name, info.index, CPU.default_device()) == ("cpu", 0, "cpu")
    assert info.label
    assert 0 < info.total_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert info.free_bytes is None or 0 < info.free_bytes <= info.total_bytes
    assert CPU.unavailable_reason() is None
    assert CPU.default_dtype("cpu") == "float32"
    assert CPU.validate_device("cpu:0") == "cpu"


@pytest.mark.parametrize("device", ["cpu:1", "cuda", "cuda:0"])
def test_another_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigurationError, match="the only one is cpu"):
        CPU.validate_device(device)


def test_streams_and_events_can_be_used_as_on_a_gpu() -> None:
    stream = CPU.stream("cpu")
    start, end = CPU.event("cpu", timing=True), CPU.event("cpu", timing=True)
    with CPU.stream_scope(stream):
        start.record(stream)
        end.record()
    stream.wait_event(end)
    stream.wait_stream(CPU.current_stream("cpu"))
    stream.synchronize()
    end.synchronize()
    end.wait(stream)
    CPU.synchronize("cpu")
    assert stream.query()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(CPU.event("cpu"))


@pytest.mark.invariant("PLATFORM-INV-001")
def test_captured_graphs_are_refused_with_the_reason() -> None:
    assert CPU.graphs_unavailable_reason() == "CPU devices have no captured graphs"
    with pytest.raises(ConfigurationError, match="CPU devices have no captured graphs; turn"):
        CPU.graph_pool("cpu")
    ran: list[int] = []
    with pytest.raises(ConfigurationError, match="CPU devices have no captured graphs; turn"):
        CPU.capture_graph("cpu", lambda: ran.append(1), pool=None, stream=CPU.stream("cpu"))
    assert ran == []


@pytest.mark.skipif(not host_memory.reset_peak(), reason="this system cannot reset the peak")
def test_the_peak_rises_with_use_and_falls_with_a_reset() -> None:
    """In a process of its own, where nothing else frees or takes memory meanwhile."""
    program = (
        "import numpy as np\n"
        "from omnistage.platforms.registry import platform_of\n"
        "cpu = platform_of('cpu')\n"
        "cpu.peak_memory_mb('cpu', reset=True)\n"
        "before_mb = cpu.peak_memory_mb('cpu')\n"
        "block = np.ones(64_000_000, np.uint8)\n"
        "high_mb = cpu.peak_memory_mb('cpu')\n"
        "assert high_mb - before_mb > 50\n"
        "assert cpu.memory_stats('cpu').peak_bytes / 1e6 > before_mb + 50\n"
        "del block\n"
        "assert cpu.peak_memory_mb('cpu', reset=True) > before_mb + 50\n"
        "assert cpu.peak_memory_mb('cpu') < high_mb - 50\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_memory_stats_are_those_of_this_process() -> None:
    stats = CPU.memory_stats("cpu")
    assert 0 < stats.allocated_bytes <= stats.peak_bytes < stats.total_bytes


@pytest.mark.invariant("PLATFORM-INV-001")
def test_capabilities_hold_only_kernels_that_run() -> None:
    found = CPU.capabilities("cpu")
    assert found.device == "cpu"
    assert found.compute_capability is None
    assert "math" in found.attention_kernels
    assert not {"cudnn", "efficient"} & set(found.attention_kernels)


@pytest.mark.invariant("PLATFORM-INV-001")
def test_an_attention_kernel_that_fails_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    assert attention_probe.usable_attention_kernels("cpu", "float32") == ()


def test_out_of_memory_is_not_taken_for_a_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    with pytest.raises(torch.OutOfMemoryError):
        attention_probe.usable_attention_kernels("cpu", "float32")


def test_threads_are_set_and_checked() -> None:
    before = torch.get_num_threads()
    try:
        set_cpu_threads(2)
        assert torch.get_num_threads() == 2
        set_cpu_threads(1)
        assert torch.get_num_threads() == 1
        with pytest.raises(ConfigurationError, match="0; it must be at least 1"):
            set_cpu_threads(0)
    finally:
        torch.set_num_threads(before)


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def fake_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "proc", meminfo="MemTotal: 999 kB\nMemAvailable: 4096 kB")
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CGROUP_ROOT", tmp_path / "cgroup")
    return tmp_path


def test_the_container_limit_bounds_memory(fake_host: Path) -> None:
    write(fake_host / "proc/self", cgroup="0::/outer/inner")
    write(fake_host / "cgroup/outer/inner", memory__max="max", memory__current=10)
    write(fake_host / "cgroup/outer", memory__max=3_000_000, memory__current=1_000_000)
    write(fake_host / "cgroup/outer", memory__stat="anon 5\ninactive_file 200000")
    assert host_memory.total_bytes() == 3_000_000
    assert host_memory.free_bytes() == 2_200_000


def test_the_container_limit_of_version_one_bounds_memory(fake_host: Path) -> None:
    write(fake_host / "proc/self", cgroup="5:cpu:/x\n4:memory:/docker/abc")
    limit, usage = {"memory__limit_in_bytes": 2_000_000}, {"memory__usage_in_bytes": 500_000}
    write(fake_host / "cgroup/memory", **limit, **usage)
    assert host_memory.total_bytes() == 2_000_000
    assert host_memory.free_bytes() == 1_500_000


def test_without_a_limit_the_host_decides(fake_host: Path) -> None:
    write(fake_host / "proc/self", cgroup="0::/")
    assert host_memory.free_bytes() == 4096 * 1024
    assert host_memory.total_bytes() > 2**30


def test_a_system_without_proc_says_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_PROC", tmp_path)
    monkeypatch.setattr(host_memory, "_CGROUP_ROOT", tmp_path)
    assert host_memory.free_bytes() is None
    assert host_memory.total_bytes() > 2**30
    assert host_memory.resident_bytes() == host_memory.peak_resident_bytes() > 2**20
    assert not host_memory.reset_peak()
    assert host_memory.cpu_label() == os.uname().machine
