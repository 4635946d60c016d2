"""The two runtimes stand side by side."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import omnistage

PACKAGE = Path(omnistage.__file__).parent


def imported_modules(source: str) -> set[str]:
    """Absolute names of everything that a module's source imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.invariant("AR-INV-100")
@pytest.mark.parametrize(("folder", "other"), [("ar", "diffusion"), ("diffusion", "ar")])
def test_neither_runtime_imports_the_other(folder, other):
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    for path in files:
        names = imported_modules(path.read_text(encoding="utf-8"))
        assert [name for name in names if f"{name}.".startswith(f"omnistage.{other}.")] == []


def test_the_check_sees_every_form_of_import():
    source = "def f():\n    from omnistage.ar import x\nimport omnistage.ar.y\n"
    assert imported_modules(source) == {"omnistage.ar.x", "omnistage.ar.y"}
