from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import omnistage
from omnistage.contracts.errors import ConfigurationError
from omnistage.platforms import registry
from omnistage.platforms.base import Platform, parse_device
from omnistage.platforms.cpu import CpuPlatform
from omnistage.platforms.cuda import CudaPlatform
from tests.platforms.fakes import FakePlatform


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("cpu", ("cpu", None)),
        ("cuda", ("cuda", None)),
        ("cuda:0", ("cuda", 0)),
        ("a:12", ("a", 12)),
    ],
)
def test_devices_are_parsed(text: str, parsed: tuple[str, int | None]) -> None:
    assert parse_device(text) == parsed


@pytest.mark.parametrize(
    "text", ["", ":", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "cuda:1:2", "c u"]
)
def test_malformed_devices_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="malformed device"):
        parse_device(text)


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'tpu:0'; allowed: cuda, cpu"):
        registry.platform_of("tpu:0")


@pytest.mark.invariant("PLATFORM-INV-001")
def test_a_registered_platform_is_used_and_then_forgotten() -> None:
    ordinary = registry.current_platform()
    with registry.register_platform(FakePlatform(), preferred=True) as fake:
        assert registry.current_platform() is fake
        assert registry.default_device() == "fake:0"
        assert registry.validate_device("fake:1") == "fake:1"
        with pytest.raises(ConfigurationError, match=r"'fake:2'.*cpu.*fake:0, fake:1"):
            registry.validate_device("fake:2")
        with registry.register_platform(FakePlatform(reason="unplugged")):
            assert registry.current_platform() is ordinary
            with pytest.raises(ConfigurationError, match=r"unplugged.*--device cpu"):
                registry.validate_device("fake")
        assert registry.platform_of("fake") is fake
    assert registry.current_platform() is ordinary
    with pytest.raises(ConfigurationError):
        registry.platform_of("fake")


def test_a_registered_platform_that_is_not_preferred_comes_last() -> None:
    with registry.register_platform(FakePlatform()) as fake:
        assert registry.platforms()[-1] is fake
        assert registry.current_platform() is not fake


def test_the_registration_ends_when_its_body_fails() -> None:
    before = registry.platforms()
    with pytest.raises(KeyError), registry.register_platform(FakePlatform()):
        raise KeyError
    assert registry.platforms() == before


def public_methods(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.invariant("PLATFORM-INV-003")
@pytest.mark.parametrize("platform", [CpuPlatform, CudaPlatform, FakePlatform])
def test_a_platform_offers_the_whole_contract_and_nothing_beside_it(
    platform: type[Platform],
) -> None:
    contract, offered = public_methods(Platform), public_methods(platform)
    assert set(offered) == set(contract)
    for name, signature in contract.items():
        assert list(offered[name].parameters) == list(signature.parameters), name


@pytest.mark.invariant("PLATFORM-INV-003")
@pytest.mark.parametrize("platform", [CpuPlatform, CudaPlatform])
def test_what_a_platform_leaves_alone_is_not_an_empty_default(platform: type[Platform]) -> None:
    for name in public_methods(Platform):
        if name not in vars(platform):
            body = ast.parse(inspect.getsource(getattr(Platform, name)).strip()).body[0]
            assert isinstance(body, ast.FunctionDef)
            last = body.body[-1]
            is_empty = isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)
            assert not is_empty, f"{name} is missing"


@pytest.mark.invariant("PLATFORM-INV-002")
def test_only_platforms_import_a_vendor_implementation() -> None:
    root = Path(omnistage.__path__[0])
    for path in root.rglob("*.py"):
        if root / "platforms" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith(("omnistage.platforms.cuda", "pynvml")), path


@pytest.mark.invariant("PLATFORM-INV-002")
def test_platforms_are_chosen_without_torch() -> None:
    script = (
        "import sys\n"
        "from omnistage.platforms import registry\n"
        "for platform in registry.platforms():\n"
        "    platform.unavailable_reason(), platform.devices()\n"
        "current = registry.current_platform()\n"
        "current.default_dtype(registry.default_device())\n"
        "registry.validate_device('cpu')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
