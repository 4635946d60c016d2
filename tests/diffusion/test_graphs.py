"""Which calls are captured and replayed, and that a replay computes what the call would."""

from __future__ import annotations

import pytest
import torch

from omnistage.diffusion.graphs import GraphCache
from omnistage.platforms.cpu import CpuPlatform
from omnistage.platforms.registry import platform_of
from tests.diffusion.graph_platform import GraphPlatform

DEVICE = "fake:0"


def whole(tensor: torch.Tensor) -> bool:
    """Integers play the host's tensors, floats the device's."""
    return not tensor.is_floating_point()


class Work:
    """scale * x + sum(lengths) + sum of shapes, counting how often Python runs it."""

    def __init__(self) -> None:
        self.calls = 0
        self.scale = torch.tensor(2.0)

    def __call__(self, x, lengths=None, shapes=(), more=None) -> torch.Tensor:
        self.calls += 1
        added = 0 if lengths is None else int(lengths.sum())
        result = self.scale * x + added + sum(shapes)
        return result if more is None else result + more["y"]


@pytest.fixture
def platform() -> GraphPlatform:
    return GraphPlatform()


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def cache(work, platform) -> GraphCache:
    return GraphCache(work, platform, DEVICE, 3, captured_at_use=3, by_value=whole)


def ones(*shape: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(*shape)}


def use(cache: GraphCache, inputs: dict, times: int = 3) -> torch.Tensor:
    return [cache(inputs) for _ in range(times)][-1]


def test_a_call_is_captured_at_the_use_that_was_set(cache, work, platform) -> None:
    assert torch.equal(use(cache, ones(2), 2), torch.full((2,), 2.0))
    assert cache.describe()["captures"] == 0
    assert work.calls == 2
    assert torch.equal(cache(ones(2)), torch.full((2,), 2.0))
    assert len(platform.graphs) == cache.describe()["captures"] == 1
    assert cache.describe()["replays"] == 1
    cache(ones(2))
    assert cache.describe()["replays"] == 2
    assert cache.describe()["uncaptured"] == {}


def test_a_replay_sees_the_new_contents_and_the_new_weights(cache, work) -> None:
    use(cache, {"x": torch.ones(2), "more": {"y": torch.zeros(2)}})
    for value in (3.0, -1.0):
        found = cache({"x": torch.full((2,), value), "more": {"y": torch.full((2,), 5.0)}})
        assert torch.equal(found, torch.full((2,), 2 * value + 5))
    work.scale.fill_(10.0)
    assert torch.equal(
        cache({"x": torch.ones(2), "more": {"y": torch.zeros(2)}}), 10 * torch.ones(2)
    )
    assert cache.describe()["captures"] == 1


def test_results_and_arguments_are_not_shared_with_the_graph(cache, platform) -> None:
    arguments = {"x": torch.ones(2), "more": {"y": torch.ones(2)}}
    first = use(cache, arguments)
    kept = first.clone()
    second = cache({"x": torch.full((2,), 7.0), "more": {"y": torch.ones(2)}})
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr()
    assert platform.graphs[0].output.data_ptr() not in (first.data_ptr(), second.data_ptr())
    assert torch.equal(arguments["x"], torch.ones(2))
    arguments["x"].fill_(100)
    arguments["more"].clear()
    assert torch.equal(cache({"x": torch.ones(2), "more": {"y": torch.ones(2)}}), kept)


@pytest.mark.invariant("DIFF-RUNTIME-INV-030")
@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(3)},
        {"x": torch.ones(2, dtype=torch.float64)},
        {"x": torch.ones(4)[::2]},
        {"lengths": torch.tensor([1, 3])},
        {"lengths": torch.tensor([1, 2], dtype=torch.int32)},
        {"lengths": None},
        {"shapes": [1, 3]},
        {"shapes": (1, 2)},
        {"shapes": [1, 2.0]},
        {"shapes": [True, 2]},
        {"more": {"y": torch.ones(2)}},
    ],
)
def test_other_shapes_and_other_values_are_other_graphs(cache, work, change) -> None:
    mine = {"x": torch.ones(2), "shapes": [1, 2], "lengths": torch.tensor([1, 2])}
    use(cache, mine)
    assert torch.equal(use(cache, mine | change), work(**mine | change))
    assert cache.describe()["captures"] == 2
    assert torch.equal(cache(mine), torch.full((2,), 8.0))
    assert cache.describe()["captures"] == 2


def test_equal_values_are_one_graph_in_whatever_order_they_come(cache) -> None:
    use(cache, {**ones(2), "lengths": torch.tensor([1, 2]), "more": {"y": torch.ones(2)}})
    cache({"more": {"y": torch.zeros(2)}, "lengths": torch.tensor([1, 2]), **ones(2)})
    assert cache.describe() == {
        "graphs": 1, "captures": 1, "replays": 2, "uncaptured": {}, "off": None,
    }  # fmt: skip


def test_the_graph_unused_for_longest_goes(cache, platform) -> None:
    for size in (1, 2, 3):
        use(cache, ones(size))
    cache(ones(1))
    use(cache, ones(4))
    assert [graph.is_reset for graph in platform.graphs] == [False, True, False, False]
    assert cache.describe()["graphs"] == 3
    cache(ones(1))
    assert cache.describe()["captures"] == 4
    use(cache, ones(2), 2)
    assert cache.describe()["captures"] == 4
    cache(ones(2))
    assert cache.describe()["captures"] == 5
    assert len(platform.pools) == 1


def test_what_is_remembered_of_calls_is_bounded(cache, platform) -> None:
    for size in range(200):
        cache(ones(size))
    assert len(cache._uses) == 48


def test_a_failed_capture_ends_capturing_and_the_call_runs_on(cache, platform, caplog) -> None:
    use(cache, ones(1))
    with platform.failing(RuntimeError("operation not permitted\nwhen capturing")):
        for size in (2, 3):
            assert torch.equal(use(cache, ones(size), 4), torch.full((size,), 2.0))
    assert torch.equal(use(cache, ones(1)), torch.full((1,), 2.0))
    assert cache.describe()["captures"] == 1
    assert cache.describe()["graphs"] == 0
    assert "RuntimeError: operation not permitted" in cache.describe()["off"]
    assert caplog.text.count("captured graphs are off") == 1


def test_out_of_memory_frees_all_graphs_and_ends_capturing(cache, platform, caplog) -> None:
    use(cache, ones(1))
    use(cache, ones(2))
    with platform.failing(torch.OutOfMemoryError("CUDA out of memory")):
        assert torch.equal(use(cache, ones(3)), torch.full((3,), 2.0))
    assert all(graph.is_reset for graph in platform.graphs)
    assert platform.caches_emptied == 1
    for size in (1, 2, 3, 4):
        assert torch.equal(use(cache, ones(size)), torch.full((size,), 2.0))
    assert cache.describe()["graphs"] == 0
    assert "out of memory" in cache.describe()["off"]
    assert caplog.text.count("captured graphs are off") == 1


def test_an_error_of_the_work_is_not_taken_for_a_failed_capture(work, platform) -> None:
    class Refused(ValueError):
        pass

    cache = GraphCache(work, platform, DEVICE, 2, captured_at_use=3, by_value=whole)
    use(cache, ones(2), 2)
    with platform.failing(Refused("no such thing")), pytest.raises(Refused):
        cache(ones(2))
    assert cache.describe()["uncaptured"] == {}


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (object(), "holds a object"),
        (torch.zeros(1000, dtype=torch.int64), "host tensor of 8000 bytes"),
    ],
)
def test_arguments_that_no_graph_is_found_by_are_told(cache, caplog, argument, told) -> None:
    def work(x, extra):
        return x

    cache = GraphCache(work, GraphPlatform(), DEVICE, 2, captured_at_use=3, by_value=whole)
    use(cache, {**ones(2), "extra": argument}, 5)
    assert cache.describe()["captures"] == 0
    assert told in next(iter(cache.describe()["uncaptured"]))
    assert caplog.text.count(told) == 1


def test_clear_frees_and_starts_anew(cache, platform) -> None:
    use(cache, ones(2))
    cache.clear()
    assert platform.graphs[0].is_reset
    assert cache.describe()["graphs"] == 0
    use(cache, ones(2))
    assert cache.describe()["captures"] == 2


def test_devices_without_graphs_run_the_work(work) -> None:
    cache = GraphCache(work, CpuPlatform(), "cpu", 2, captured_at_use=3)
    assert torch.equal(use(cache, ones(2), 5), torch.full((2,), 2.0))
    assert work.calls == 5
    assert cache.describe()["off"] == "CPU devices have no captured graphs"


cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device(layer: torch.nn.Module) -> GraphCache:
    return GraphCache(lambda x: layer(x), platform_of("cuda:0"), "cuda:0", 4, captured_at_use=3)


class TestOnTheDevice:
    pytestmark = cuda

    @torch.no_grad()
    def test_a_replay_gives_the_bits_of_the_call(self) -> None:
        layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda().half()
        cache = on_device(layer)
        for size in (8, 16, 8, 16, 8, 16, 8, 16, 32, 32, 32):
            x = torch.randn(size, 64, device="cuda", dtype=torch.half)
            assert torch.equal(cache({"x": x}), layer(x))
        assert cache.describe()["captures"] == 3
        assert cache.describe()["replays"] == 5
        layer[0].weight.mul_(2)
        x = torch.randn(8, 64, device="cuda", dtype=torch.half)
        assert torch.equal(cache({"x": x}), layer(x))
        assert cache.describe()["uncaptured"] == {}

    @torch.no_grad()
    def test_what_cannot_be_captured_runs_on_without_graphs(self) -> None:
        def waits(x: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum()) if x.shape[0] == 2 else x * 2

        cache = GraphCache(waits, platform_of("cuda:0"), "cuda:0", 4, captured_at_use=3)
        for size in (2, 2, 2, 2, 3, 3, 3, 3):
            x = torch.ones(size, device="cuda")
            assert torch.equal(cache({"x": x}), waits(x))
        reason = cache.describe()["off"]
        assert "captur" in reason
        assert "previous error" not in reason
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        before = torch.cuda.memory_allocated()
        block = torch.ones(10_000_000, device="cuda")
        del block
        assert torch.cuda.memory_allocated() - before < 10_000_000

    @torch.no_grad()
    def test_graphs_share_one_pool_and_give_it_back(self) -> None:
        layer = torch.nn.Linear(4096, 4096).cuda().half()
        cache, platform = on_device(layer), platform_of("cuda:0")
        platform.empty_cache("cuda:0")
        before = platform.memory_stats("cuda:0").reserved_bytes
        for size in (1000, 1001, 1002, 1003):
            use(cache, {"x": torch.ones(size, 4096, device="cuda", dtype=torch.half)})
        assert cache.describe()["graphs"] == 4
        cache.clear()
        platform.empty_cache("cuda:0")
        assert platform.memory_stats("cuda:0").reserved_bytes - before < 80 * 2**20

    @torch.no_grad()
    def test_another_thread_may_copy_to_the_host_during_a_capture(self) -> None:
        import threading

        layer = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(50))).cuda()
        cache, stop, copied = on_device(layer), threading.Event(), []
        source = torch.ones(1000, device="cuda")

        def copy() -> None:
            while not stop.is_set():
                copied.append(float(source.cpu().sum()))

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            for size in range(1, 5):
                use(cache, {"x": torch.ones(size, 256, device="cuda")}, 4)
        finally:
            stop.set()
            thread.join(timeout=60)
        assert set(copied) == {1000.0}
        assert cache.describe()["captures"] == 4
        assert cache.describe()["uncaptured"] == {}
