"""What the installed torch was built for, read without importing it (that takes seconds)."""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def torch_version() -> str | None:
    return package_version("torch")


def package_version(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@functools.cache
def torch_cuda_version() -> str | None:
    """The CUDA version of the installed torch, or None for a build without CUDA."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).with_name("version.py")
    spec = importlib.util.spec_from_file_location("_torch_version", path)
    if spec is None or spec.loader is None or not path.exists():
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "cuda", None)
