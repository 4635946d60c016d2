"""Importing OmniStage is instant, has no side effects and needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import omnistage

IMPORT_LIMIT_S = 0.5
HEAVY = ("torch", "torchvision", "transformers", "diffusers", "accelerate")
TORCH_FREE = ("omnistage.engine", "omnistage.api", "omnistage.cli", "omnistage.config")


def in_fresh_python(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_fast_and_leaves_torch_alone() -> None:
    code = (
        "import json, sys, time; start = time.perf_counter(); import omnistage; "
        "print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))"
    )
    runs = [in_fresh_python(code) for _ in range(3)]
    assert min(elapsed for elapsed, _ in runs) < IMPORT_LIMIT_S
    assert not set(HEAVY) & set(runs[0][1])


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_module_of_these_packages_imports_torch(package: str) -> None:
    code = f"""
import importlib, json, pkgutil, sys
package = importlib.import_module({package!r})
names = [m.name for m in pkgutil.walk_packages(package.__path__, {package!r} + ".")]
for name in names:
    importlib.import_module(name)
print(json.dumps([names, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    names, heavy = in_fresh_python(code)
    assert names, f"{package} has no modules"
    assert heavy == []


@pytest.mark.parametrize(
    "runtime",
    ["omnistage.diffusion.runtime", "omnistage.ar.runtime", "omnistage.ar.generation.runtime"],
)
def test_a_runtime_is_asked_for_its_scheduler_without_torch(runtime: str) -> None:
    """The command line does so to say what a start would refuse."""
    code = f"""
import importlib, json, sys
importlib.import_module({runtime!r})
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert in_fresh_python(code) == []


def test_import_has_no_side_effects() -> None:
    code = """
import json, os, signal, threading
def state():
    handlers = [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)]
    return [dict(os.environ), os.getcwd(), threading.active_count(), handlers]
before = state()
import omnistage
print(json.dumps(before == state()))
"""
    assert in_fresh_python(code) is True


def test_public_names() -> None:
    assert omnistage.__all__ == [
        "AsyncOmni",
        "GenericParams",
        "Omni",
        "OmniDiffusionSamplingParams",
        "OmniRequestOutput",
        "OmniTokenSamplingParams",
        "StructuredOutput",
        "__version__",
    ]
    for name in omnistage.__all__:
        assert getattr(omnistage, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        omnistage.Nothing  # noqa: B018
