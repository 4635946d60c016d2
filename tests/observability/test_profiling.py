from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omnistage.contracts.errors import InvalidRequestError
from omnistage.observability import profiling
from omnistage.observability.profiling import Profiler


@pytest.fixture
def profiler(tmp_path: Path) -> Profiler:
    return Profiler(tmp_path / "profiles", stage="dit/α", replica=2, rank=1)


def work() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 16, generator=generator) @ torch.rand(16, 16)


def trace_of(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


@pytest.mark.invariant("PROFILE-INV-001")
def test_nothing_is_recorded_until_asked(profiler: Profiler, tmp_path: Path) -> None:
    with profiler.region("step", ("req-1",)):
        work()
    profiler.step()
    profiler.close()
    assert not profiler.running
    assert list(tmp_path.iterdir()) == []
    script = (
        "import sys, pathlib\n"
        "from omnistage.observability.profiling import Profiler\n"
        "profiler = Profiler(pathlib.Path('x'), stage='s', replica=0)\n"
        "with profiler.region('step'): profiler.step()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.invariant("PROFILE-INV-003")
def test_a_trace_names_stage_rank_operation_and_request(profiler: Profiler) -> None:
    profiler.start()
    with profiler.region("denoise", ("req-1", "req-2")):
        work()
    path = profiler.stop()
    assert profiler.traces == (path,)
    assert path.name.startswith("dit__-replica2-rank1-")
    trace = trace_of(path)
    assert (trace["stage"], trace["replica"], trace["rank"]) == ("dit__", 2, 1)
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"denoise req-1 req-2", "aten::mm"} <= names


@pytest.mark.invariant("PROFILE-INV-003")
def test_a_trace_holds_no_shapes_and_no_source(profiler: Profiler) -> None:
    profiler.start()
    work()
    text = gzip.decompress(profiler.stop().read_bytes()).decode()
    assert "aten::mm" in text
    assert "Input Dims" not in text
    assert Path(__file__).name not in text


@pytest.mark.invariant("PROFILE-INV-001")
def test_a_recording_ends_after_its_steps(profiler: Profiler) -> None:
    profiler.start(max_steps=2)
    profiler.step()
    assert profiler.running
    profiler.step()
    assert not profiler.running
    assert len(profiler.traces) == 1
    profiler.step()
    assert len(profiler.traces) == 1


@pytest.mark.invariant("PROFILE-INV-001")
def test_a_recording_ends_after_its_time(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now_s[0])
    profiler.start(max_s=5)
    profiler.step()
    assert profiler.running
    now_s[0] += 5
    profiler.step()
    assert not profiler.running


def test_start_and_stop_can_be_repeated_and_write_a_file_each(profiler: Profiler) -> None:
    paths = set()
    for _ in range(3):
        profiler.start()
        work()
        paths.add(profiler.stop())
    assert len(paths) == 3
    assert set(profiler.traces) == paths
    assert set(next(iter(paths)).parent.iterdir()) == paths


def test_wrong_calls_are_refused(profiler: Profiler) -> None:
    with pytest.raises(InvalidRequestError, match="not running"):
        profiler.stop()
    for bounds in ({"max_steps": 0}, {"max_s": 0.0}):
        with pytest.raises(InvalidRequestError, match="must be positive"):
            profiler.start(**bounds)
    profiler.start()
    with pytest.raises(InvalidRequestError, match="already"):
        profiler.start()
    profiler.close()
    assert not profiler.running
    assert profiler.traces == ()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = Profiler(tmp_path / "file" / "profiles", stage="s", replica=0)
    with pytest.raises(InvalidRequestError, match=r"file/profiles cannot be made"):
        profiler.start()
    assert not profiler.running


def test_a_failed_export_leaves_no_file_and_can_be_repeated(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: object, path: str) -> None:
        Path(path).write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "export_chrome_trace", full_disk)
        profiler.start()
        with pytest.raises(OSError, match="disk full"):
            profiler.stop()
    assert list((tmp_path / "profiles").iterdir()) == []
    profiler.start()
    assert profiler.stop().exists()


@pytest.mark.invariant("PROFILE-INV-002")
def test_results_and_random_state_are_the_same_under_a_profile(profiler: Profiler) -> None:
    torch.manual_seed(5)
    plain, plain_state = work(), torch.get_rng_state()
    torch.manual_seed(5)
    profiler.start()
    with profiler.region("step"):
        profiled = work()
    profiler.stop()
    assert torch.equal(plain, profiled)
    assert torch.equal(plain_state, torch.get_rng_state())
