"""Each benchmark runs, checks its work, and ends with one JSON object of the agreed form.

What it measures here means nothing: one round, a toy workload, a busy machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import checkpoint

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240
KEYS = {
    *("name", "value", "unit", "peer", "peer_value", "ratio", "target", "met"),
    *("hardware", "versions", "workload"),
}


def benchmark(name: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and result of one round on a tiny model."""
    words = [str(ROOT / "benchmarks" / f"{name}.py"), "--model", str(checkpoint("qwen_image"))]
    return finished([*words, "--rounds", "1", *flags])


def finished(words: list[str]) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def check_form(result: dict[str, Any], name: str) -> None:
    assert set(result) >= KEYS
    assert (result["name"], result["unit"]) == (name, "s")
    assert 0 < result["value"] < DEADLINE_S
    assert 0 < result["peer_value"] < DEADLINE_S
    assert result["ratio"] == pytest.approx(result["value"] / result["peer_value"], rel=1e-2)
    assert {"torch", "diffusers", "omnistage"} <= set(result["versions"])
    assert "cores" in result["hardware"]
    assert str(ROOT) not in json.dumps(result), "a result names a path of this machine"


@pytest.mark.slow
def test_overhead() -> None:
    code, result = benchmark("overhead", "--side", "32", "--steps", "2", "--true-cfg-scale", "4")
    check_form(result, "overhead")
    variants = result["variants"]
    assert set(variants) == {"inline", "spawned"}
    assert result["ratio"] == pytest.approx(max(v["ratio"] for v in variants.values()), rel=1e-2)
    assert result["met"] == all(one["ratio"] <= result["target"] for one in variants.values())
    assert code == (0 if result["met"] else 1)
    assert "32x32, 2 steps" in result["workload"]


@pytest.mark.slow
def test_startup() -> None:
    code, result = benchmark("startup", "--side", "32", "--warmup", "0")
    check_form(result, "startup")
    assert result["target"] == pytest.approx(result["peer_value"] + 2)
    assert result["met"] == (result["value"] <= result["target"])
    assert code == (0 if result["met"] else 1)


def test_kept_results_have_the_form() -> None:
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        if file.stem.startswith("spike_"):
            continue  # what a trial of mechanisms found: no comparison
        kept = json.loads(file.read_text())
        assert set(kept) >= KEYS, file.name
        assert kept["name"] == file.stem
        assert "/home/" not in file.read_text()


@pytest.mark.slow
def test_step_batching() -> None:
    sizes = ("--sizes", "32", "64", "--mixed", "4")
    flags = ("--side", "32", "--steps", "2", "--concurrency", "2", *sizes)
    code, result = benchmark("step_batching", *flags)
    check_rate(result, "step_batching", code)
    variants = result["variants"]
    assert set(variants) == {"step", "request", "diffusers", "mixed_sizes"}
    assert result["met"] == (variants["step"]["ratio"] >= result["target"])
    for side in ("ours", "fifo"):
        assert 0 < variants["mixed_sizes"][side]["p50_s"] <= variants["mixed_sizes"][side]["p99_s"]


@pytest.mark.slow
def test_qwen_image() -> None:
    code, result = toy("qwen_image", "--steps", "2", "--rounds", "1")
    assert set(result) >= KEYS
    assert (code, result["met"], result["unit"]) == (1, False, "ms/step"), "a toy meets no target"
    for size in ("64", "32"):
        found = result["variants"][size]
        ms = found["step_ms"]
        assert set(ms) == {"diffusers_eager", "diffusers_compiled", "ours", "ours_eager"}
        assert min(ms.values()) > 0
        assert found["peer_over_ours"]["diffusers_eager"] > 0


@pytest.mark.slow
def test_qwen_image_serving() -> None:
    flags = ("--steps", "4", "--requests", "4", "--clients", "2", "--cancels", "20")
    code, result = toy("qwen_image_serving", *flags)
    check_rate(result, "qwen_image_serving", code)
    assert {name.partition("/")[0] for name in result["closed"]} == {
        *("step", "request", "request_alone", "diffusers")
    }
    cancels = result["cancels"]
    assert cancels["cancels"] == 20
    assert cancels["steps_of_a_cancelled_request_after_its_command"] == 0
    assert cancels["steps_until_its_place_is_taken"] <= 1


def check_rate(result: dict[str, Any], name: str, code: int) -> None:
    assert set(result) >= KEYS
    assert (result["name"], result["unit"]) == (name, "requests/s")
    assert result["value"] > 0
    assert result["ratio"] == pytest.approx(result["value"] / result["peer_value"], rel=1e-2)
    assert code == (0 if result["met"] else 1)


def toy(name: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """A benchmark of a GPU, on the CPU."""
    return finished([str(ROOT / "benchmarks" / f"{name}.py"), "--tiny", *flags])
