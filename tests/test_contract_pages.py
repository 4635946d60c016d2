"""The contract pages tell the truth: their paths exist and their invariants are tested."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "omnistage"
PAGES = sorted((ROOT / "docs" / "contracts").glob("*.md"))

INVARIANT = re.compile(r"\b[A-Z]+(?:-[A-Z]+)*-INV-\d{3}\b")
HEADING = re.compile(r"^### ([A-Z]+(?:-[A-Z]+)*-INV-\d{3}): \S", re.MULTILINE)
BACKTICKED = re.compile(r"`([^`\n]+)`")
TOP_FOLDERS = ("src", "tests", "docs", "benchmarks", "training", "examples", ".ci")
PATH_SUFFIXES = (".py", ".yaml", ".yml", ".md", ".toml", ".json", ".txt", ".safetensors")

MAX_LINES = 60


def looks_like_path(text: str) -> bool:
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", text):
        return False
    return text.split("/")[0] in TOP_FOLDERS or ("/" in text and text.endswith(PATH_SUFFIXES))


def path_exists(text: str) -> bool:
    return any(any(base.glob(text.rstrip("/"))) for base in (ROOT, PACKAGE))


def defined_on(page: Path) -> list[str]:
    return HEADING.findall(page.read_text(encoding="utf-8"))


def marks_in(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and node.func.attr == "invariant":
            yield node


def ids_of(mark: ast.Call) -> list[str]:
    return [arg.value for arg in mark.args if isinstance(arg, ast.Constant)]


def marks_on_tests(module: ast.Module) -> Iterator[ast.Call]:
    """Marks that pytest applies: on test functions and classes, and `pytestmark`."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.lower().startswith("test"):
                for decorator in node.decorator_list:
                    yield from marks_in(decorator)
        elif isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0]):
            yield from marks_in(node.value)


def carriers() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for mark in marks_on_tests(module):
            for name in ids_of(mark):
                found[name].add(str(path.relative_to(ROOT)))
    return found


def folders() -> list[str]:
    return sorted(
        path.name
        for path in PACKAGE.iterdir()
        if path.is_dir() and (any(path.rglob("*.py")) or any(path.rglob("*.yaml")))
    )


@pytest.mark.parametrize("folder", folders())
def test_every_folder_has_its_page(folder: str) -> None:
    assert ROOT / "docs" / "contracts" / f"{folder}.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_belongs_to_a_folder_and_has_invariants(page: Path) -> None:
    assert page.stem.split("__")[0] in folders(), "a folder's, or one part's: folder__part.md"
    assert defined_on(page), f"{page.name} has no heading '### XXX-INV-NNN: Title'"
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_on_a_page_exists(page: Path) -> None:
    named = BACKTICKED.findall(page.read_text(encoding="utf-8"))
    paths = [text for text in named if looks_like_path(text)]
    assert any(text.startswith("src/") for text in paths), "a page names its code"
    assert any(text.startswith("tests/") for text in paths), "a page names its tests"
    missing = [text for text in paths if not path_exists(text)]
    assert not missing, f"{page.name} names paths that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_invariant_of_a_page_is_tested(page: Path) -> None:
    tested = carriers()
    untested = [name for name in defined_on(page) if name not in tested]
    assert not untested, f"{page.name}: no test carries {untested}"


def test_every_tested_invariant_is_on_exactly_one_page() -> None:
    pages: dict[str, list[str]] = defaultdict(list)
    for page in PAGES:
        for name in defined_on(page):
            pages[name].append(page.name)
    for name, files in carriers().items():
        assert len(pages[name]) == 1, f"{name} of {sorted(files)} is on {pages[name] or 'no page'}"


def test_every_mentioned_invariant_is_defined() -> None:
    defined = {name for page in PAGES for name in defined_on(page)}
    for page in PAGES:
        mentioned = set(INVARIANT.findall(page.read_text(encoding="utf-8")))
        assert mentioned <= defined, f"{page.name} mentions {sorted(mentioned - defined)}"


def test_every_mark_is_on_a_test_and_names_its_ids_in_full() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        applied = {id(mark) for mark in marks_on_tests(module)}
        for mark in marks_in(module):
            where = f"{path.relative_to(ROOT)}:{mark.lineno}"
            assert id(mark) in applied, f"{where}: the mark is on nothing that pytest runs"
            names = ids_of(mark)
            assert names, f"{where}: the mark names no id"
            assert len(names) == len(mark.args), f"{where}: ids are string literals"
            assert all(INVARIANT.fullmatch(name) for name in names), f"{where}: {names}"


def test_the_checks_can_fail(tmp_path: Path) -> None:
    assert looks_like_path("src/omnistage/none.py")
    assert not path_exists("src/omnistage/none.py")
    assert path_exists("src/omnistage/contracts/*.py")
    assert path_exists("contracts/errors.py")
    assert not looks_like_path("/v1/models")
    assert not looks_like_path("text/event-stream")
    module = ast.parse(
        "@pytest.mark.invariant('A-INV-001')\ndef helper(): ...\n"
        "@pytest.mark.invariant('A-INV-002')\ndef test_it(): ...\n"
    )
    assert [ids_of(mark) for mark in marks_on_tests(module)] == [["A-INV-002"]]
    assert len(list(marks_in(module))) == 2
