"""Benchmarks of offload and planner run on a CPU that plays a device, and judge what they see."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.test_benchmarks import DEADLINE_S, KEYS, ROOT, toy


@pytest.mark.slow
def test_offload(tmp_path) -> None:
    folders = ("--folder", str(tmp_path), "--cache-folder", str(tmp_path))
    code, result = toy("offload", "--models", "qwen", *folders)
    assert code == 0
    assert set(result) >= KEYS
    assert set(result["models"]) == {"qwen"}
    qwen = result["models"]["qwen"]
    assert [row["residency"] for row in qwen["streamed"]] == [0.0, 0.5, 0.9]
    for row in qwen["streamed"]:
        assert row["page_locked"]
        assert row["eager_rows1"]["differs_by"] == row["compiled_rows2"]["differs_by"] == 0
    assert not any(tmp_path.glob("*/transformer")), "the checkpoint is still there"


@pytest.mark.slow
def test_planner(tmp_path) -> None:
    code, result = toy("planner", "--models", "flux", "--folder", str(tmp_path))
    assert code == 0
    assert set(result) >= KEYS
    assert result["combinations"] == len(result["rows"]) == 2
    assert {row["strategy"] for row in result["rows"]} == {"layerwise"}
    assert result["out_of_memory"] == 0
    errors = [abs(row["step_error"]) for row in result["rows"]]
    assert result["worst_step_error"] == max(errors)
    assert not result["met"], "a toy on a busy machine meets no target"


@pytest.mark.parametrize("name", ["offload", "planner", "offload_mechanisms"])
def test_they_say_what_they_do(name) -> None:
    """Imports all that they need, whether or not a GPU is here."""
    words = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Prints one" in done.stdout
