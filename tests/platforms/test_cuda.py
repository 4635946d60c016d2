"""The driver is played by `FakeDriver`, except where a test is marked `gpu`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omnistage.contracts.errors import ConfigurationError
from omnistage.platforms import cuda, cuda_driver, registry, torch_build
from omnistage.platforms.cuda import CudaPlatform
from omnistage.platforms.presence import visible_accelerators
from tests.platforms.fakes import FakePlatform

CUDA = CudaPlatform()

needs_a_card = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device that torch can use"
)


class FakeDriver:
    """libcuda and NVML with `count` GPUs: writes its answers where ctypes points to."""

    def __init__(
        self, count: int = 2, status: int = 0, capability: tuple[int, int] = (9, 0)
    ) -> None:
        self.count, self.status, self.capability = count, status, capability
        self.open_sessions = 0

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = f"Card {device.value}".encode()
        return 0

    def cuDeviceGetPCIBusId(self, bus: Any, size: int, device: ctypes.c_int) -> int:
        bus.value = f"0000:0{device.value}:00.0".encode()
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: ctypes.c_int) -> int:
        total._obj.value = 80 * 2**30
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = self.capability[attribute - 75]
        return 0

    def nvmlInit_v2(self) -> int:
        self.open_sessions += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open_sessions -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, handle: Any) -> int:
        handle._obj.value = int(bus[6:7]) + 1
        return 0 if bus.startswith(b"0000:0") else 2

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.free = handle.value * 2**30
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_load", lambda *names: fake)
    monkeypatch.setattr(cuda, "torch_cuda_version", lambda: "13.0")
    cuda_driver.probe_driver.cache_clear()
    yield fake
    cuda_driver.probe_driver.cache_clear()


def test_devices_are_those_of_the_driver(driver: FakeDriver) -> None:
    first, second = CUDA.devices()
    assert (first.name, second.name, second.label) == ("cuda:0", "cuda:1", "Card 1")
    assert (second.total_bytes, second.free_bytes) == (80 * 2**30, 2 * 2**30)
    assert second.compute_capability == (9, 0)
    assert driver.open_sessions == 0
    assert CUDA.validate_device("cuda") == CUDA.default_device() == "cuda:0"
    assert registry.current_platform().device_type == "cuda"


def test_a_card_unknown_to_nvml_has_no_free_bytes(driver: FakeDriver) -> None:
    assert cuda_driver.free_bytes("ffff:00:00.0") is None
    assert driver.open_sessions == 0


@pytest.mark.invariant("PLATFORM-INV-001")
@pytest.mark.parametrize(
    ("capability", "dtype"), [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float16")]
)
def test_the_default_dtype_follows_the_card(
    driver: FakeDriver, capability: tuple[int, int], dtype: str
) -> None:
    driver.capability = capability
    assert CUDA.default_dtype("cuda:0") == dtype


@pytest.mark.invariant("PLATFORM-INV-001")
def test_an_absent_card_names_those_that_are_there(driver: FakeDriver) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'cuda:2'; use --device cpu or one of: cuda:0, cuda:1"
    ):
        registry.validate_device("cuda:2")


@pytest.mark.invariant("PLATFORM-INV-001")
@pytest.mark.parametrize(
    ("count", "status", "named"),
    [(0, 0, "CUDA_VISIBLE_DEVICES"), (1, 100, "no GPU is visible"), (1, 803, "error 803")],
)
def test_a_driver_without_cards_says_why(
    driver: FakeDriver, count: int, status: int, named: str
) -> None:
    driver.count, driver.status = count, status
    with pytest.raises(ConfigurationError, match=named) as caught:
        registry.validate_device("cuda")
    assert "--device cpu" in caught.value.message
    assert CUDA.devices() == ()
    assert registry.current_platform().device_type == "cpu"


@pytest.mark.invariant("PLATFORM-INV-001")
def test_a_missing_driver_is_named(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_load", lambda *names: None)
    with pytest.raises(ConfigurationError, match="no NVIDIA driver is installed"):
        registry.validate_device("cuda:0")
    assert cuda_driver.free_bytes("0000:00:00.0") is None


@pytest.mark.invariant("PLATFORM-INV-001")
def test_a_torch_without_cuda_is_named(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "torch_cuda_version", lambda: None)
    with pytest.raises(ConfigurationError, match=r"built without CUDA.*https://"):
        registry.validate_device("cuda:0")


def test_a_broken_driver_call_is_an_error(driver: FakeDriver) -> None:
    driver.cuDeviceGetName = lambda *arguments: 999  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cuDeviceGetName failed with error 999"):
        CUDA.devices()


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    torch_build.torch_cuda_version.cache_clear()
    assert torch_build.torch_cuda_version() == torch.version.cuda
    assert torch.__version__.startswith(str(torch_build.torch_version()))
    assert torch_build.package_version("no-such-package") is None
    assert "_torch_version" not in sys.modules


def test_a_build_without_cuda_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text("cuda = None\n")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    torch_build.torch_cuda_version.cache_clear()
    assert torch_build.torch_cuda_version() is None
    torch_build.torch_cuda_version.cache_clear()


@pytest.mark.gpu
@needs_a_card
def test_the_driver_and_torch_see_the_same_cards() -> None:
    devices = CUDA.devices()
    assert len(devices) == torch.cuda.device_count() > 0
    for info in devices:
        properties = torch.cuda.get_device_properties(info.index)
        assert info.label == properties.name
        assert info.total_bytes == properties.total_memory
        assert info.compute_capability == (properties.major, properties.minor)
        free_bytes, _ = torch.cuda.mem_get_info(info.index)
        assert info.free_bytes == pytest.approx(free_bytes, abs=2 * 2**30)


@pytest.mark.gpu
@needs_a_card
def test_streams_events_and_memory_of_a_card() -> None:
    device = CUDA.default_device()
    stream, start, end = CUDA.stream(device), *(CUDA.event(device, timing=True) for _ in "ab")
    before_mb = CUDA.memory_stats(device).allocated_bytes / 1e6
    CUDA.peak_memory_mb(device, reset=True)
    with CUDA.stream_scope(stream):
        assert CUDA.current_stream(device) == stream
        start.record(stream)
        block = torch.ones(50_000_000, dtype=torch.uint8, device=device)
        end.record(stream)
    CUDA.current_stream(device).wait_event(end)
    CUDA.synchronize(device)
    assert end.query()
    assert start.elapsed_time(end) > 0
    assert CUDA.memory_stats(device).allocated_bytes / 1e6 >= before_mb + 50
    del block
    assert CUDA.peak_memory_mb(device, reset=True) >= before_mb + 50
    assert CUDA.peak_memory_mb(device) < before_mb + 50


@pytest.mark.gpu
@needs_a_card
def test_a_captured_graph_repeats_the_work_on_new_contents() -> None:
    device = CUDA.default_device()
    assert CUDA.graphs_unavailable_reason() is None
    source, ran = torch.ones(4, device=device), []

    def work() -> torch.Tensor:
        ran.append(1)
        return source * 2 + 1

    pool, stream = CUDA.graph_pool(device), CUDA.stream(device)
    graph, result = CUDA.capture_graph(device, work, pool=pool, stream=stream)
    assert len(ran) == 2
    for value in (1.0, 5.0):
        source.fill_(value)
        graph.replay()
        assert torch.equal(result.cpu(), torch.full((4,), 2 * value + 1))
    assert len(ran) == 2
    graph.reset()
    with pytest.raises(RuntimeError):
        CUDA.capture_graph(device, lambda: float(source.sum()), pool=pool, stream=stream)
    again, result = CUDA.capture_graph(device, work, pool=CUDA.graph_pool(device), stream=stream)
    again.replay()
    assert torch.equal(result.cpu(), torch.full((4,), 11.0))


@pytest.mark.gpu
@needs_a_card
def test_capabilities_of_a_card() -> None:
    found = CUDA.capabilities("cuda")
    assert found.device == "cuda:0"
    assert "math" in found.attention_kernels
    if found.compute_capability == (9, 0):
        assert {"flash", "cudnn", "efficient"} <= set(found.attention_kernels)
        assert found.bfloat16
        assert found.float8


def test_accelerators_are_the_cards_torch_can_use(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert visible_accelerators() == ("cuda:0", "cuda:1")
    with registry.register_platform(FakePlatform(count=1)):
        assert visible_accelerators() == ("cuda:0", "cuda:1", "fake:0")
    monkeypatch.setattr(cuda, "torch_cuda_version", lambda: None)
    assert visible_accelerators() == ()
