from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import omnistage.api
from omnistage.engine.async_omni import AsyncOmni
from omnistage.engine.health import EngineHealth
from omnistage.observability.metrics import EngineMetrics
from tests.api.fake_engine import FakeEngine, FakeHealth, FakeMetrics

SOURCES = sorted(Path(omnistage.api.__file__).parent.rglob("*.py"))
ALLOWED_LAYERS = {"api", "engine", "config", "contracts", "observability"}


def imported_layers(source: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("omnistage."):
            names.add(str(node.module).split(".")[1])
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("omnistage.")}
    return names


@pytest.mark.invariant("ENTRY-INV-001")
def test_routes_know_the_engine_and_nothing_behind_it() -> None:
    assert len(SOURCES) > 15
    for source in SOURCES:
        assert imported_layers(source) <= ALLOWED_LAYERS, source


@pytest.mark.invariant("ENTRY-INV-001")
def test_the_server_imports_neither_torch_nor_the_engine() -> None:
    script = (
        "import sys, omnistage.api.http_side, omnistage.api.server; "
        "found = {'torch', 'diffusers', 'transformers', 'omnistage.engine.async_omni'} "
        "& set(sys.modules); "
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_fake_engine_has_the_interface_of_the_real_one() -> None:
    for name in ("start", "drain", "shutdown", "generate", "abort", "health"):
        fake = inspect.signature(getattr(FakeEngine, name)).parameters
        real = inspect.signature(getattr(AsyncOmni, name)).parameters
        assert list(fake) == [p for p in real if p in fake], name
        for parameter in fake.values():
            assert parameter.kind is real[parameter.name].kind
            assert parameter.default == real[parameter.name].default
        added = [real[p] for p in real if p not in fake]
        assert all(parameter.default is not inspect.Parameter.empty for parameter in added)
    assert {f.name for f in fields(FakeHealth)} == {f.name for f in fields(EngineHealth)}
    for name in ("http_request", "images_generated", "render"):
        fake_call = inspect.signature(getattr(FakeMetrics, name)).parameters
        assert list(fake_call) == list(inspect.signature(getattr(EngineMetrics, name)).parameters)
