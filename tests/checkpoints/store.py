"""Builds each checkpoint once and keeps it, whatever the number of processes that ask."""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import cache
from importlib.metadata import version
from pathlib import Path

from .families import FAMILIES
from .token_families import TOKEN_FAMILIES

PACKAGE = Path(__file__).parent
REPOSITORY = PACKAGE.parents[1]
# What shapes the bytes of a checkpoint, besides the source of the builders.
LIBRARIES = "torch", "transformers", "diffusers", "tokenizers"
BUILD_DEADLINE_S = 300


def checkpoint(name: str) -> Path:
    """The folder of family `name`'s checkpoint, built if no process has built it yet.

    Treat it as read-only, for others share it; `broken.py` derives damaged copies. The name of
    the folder carries a digest of the builders' source and of the library versions, so a stale
    one is never found. A builder that dies leaves only a `.partial` folder, which the next one
    clears. Raises `KeyError` for an unknown family.
    """
    from filelock import FileLock

    family = (FAMILIES | TOKEN_FAMILIES)[name]
    others = "families" if name in TOKEN_FAMILIES else "token_families"
    folder = cache_root() / f"{name}-{builders_digest(others)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=BUILD_DEADLINE_S):
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            family.build(partial)
            os.replace(partial, folder)
    return folder


def cache_root() -> Path:
    """`$OMNISTAGE_TEST_CACHE`, or a folder of this checkout."""
    chosen = os.environ.get("OMNISTAGE_TEST_CACHE")
    return Path(chosen) if chosen else REPOSITORY / ".cache" / "checkpoints"


@cache
def builders_digest(others: str) -> str:
    """Changes with any builder's source and with any library that a checkpoint's bytes depend on.

    Left out are the folder of the `others`, and `broken.py`, which only copies.
    """
    sources = sorted(
        path
        for path in PACKAGE.rglob("*.py")
        if path.name != "broken.py" and path.parent.name != others
    )
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    for library in LIBRARIES:
        digest.update(f"{library}={version(library)}".encode())
    return digest.hexdigest()[:12]
