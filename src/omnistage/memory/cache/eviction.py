"""Which entries there are, and which go to make room: the least recently used, none in use.

All functions that remove are called under the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnistage.memory.cache.errors import CacheError
from omnistage.memory.cache.folders import StoreFolders
from omnistage.memory.cache.lock import FileLock
from omnistage.memory.cache.manifest import Manifest, SealError, unsealed
from omnistage.memory.cache.writer import IN_USE_NAME, MANIFEST_NAME
from omnistage.memory.plan import gib


@dataclass(frozen=True, kw_only=True)
class EntryState:
    """An entry seen from outside. `used_s` is when it was last opened, in seconds since 1970.
    `manifest` is None when it cannot be read."""

    name: str
    folder: Path
    nbytes: int
    used_s: float
    in_use: bool
    manifest: Manifest | None


def states(folders: StoreFolders) -> list[EntryState]:
    """All entries, the least recently used first. Reads no weights."""
    found = []
    for folder in folders.entries.glob("*"):
        if not folder.is_dir():  # not ours: a file browser's, a network file system's
            continue
        try:
            found.append(_state(folder))
        except FileNotFoundError:  # removed by another process meanwhile
            continue
    return sorted(found, key=lambda state: (state.used_s, state.name))


def _state(folder: Path) -> EntryState:
    lock_file = folder / IN_USE_NAME
    used_s = lock_file.stat().st_mtime if lock_file.exists() else 0.0
    try:
        manifest = unsealed((folder / MANIFEST_NAME).read_bytes(), Manifest)
    except (SealError, OSError):
        manifest = None
    lock = _unused(folder)
    if lock is not None:
        lock.release()
    return EntryState(
        name=folder.name,
        folder=folder,
        nbytes=sum(path.stat().st_size for path in folder.iterdir()),
        used_s=used_s,
        in_use=lock is None,
        manifest=manifest,
    )


def _unused(folder: Path) -> FileLock | None:
    """The exclusive lock of an entry that nobody has open."""
    lock_file = folder / IN_USE_NAME
    return FileLock.acquire(lock_file, create=not lock_file.exists())


def make_room(folders: StoreFolders, needed_bytes: int, limit_bytes: int) -> list[EntryState]:
    """Remove until `needed_bytes` more fit under the limit; returns what went.

    Raises `CacheError`, with nothing removed, when that cannot be.
    """
    if needed_bytes > limit_bytes:
        raise CacheError(
            f"{gib(needed_bytes)} are needed and weight_cache_limit_gib allows {gib(limit_bytes)}; "
            "raise it, or stream fewer layers"
        )
    present = states(folders)
    surplus_bytes = sum(state.nbytes for state in present) + needed_bytes - limit_bytes
    held: list[tuple[EntryState, FileLock]] = []
    try:
        for state in present:
            if surplus_bytes <= 0:
                break
            lock = _unused(state.folder)
            if lock is not None:
                held.append((state, lock))
                surplus_bytes -= state.nbytes
        if surplus_bytes > 0:
            raise CacheError(
                f"{gib(needed_bytes)} are needed, and entries in use leave {gib(surplus_bytes)} "
                "too little of weight_cache_limit_gib; raise it, or choose another weight_cache_dir"
            )
        for state, _ in held:
            folders.discard(state.folder)
    finally:
        for _, lock in held:
            lock.release()
    return [state for state, _ in held]


def remove_if(
    folders: StoreFolders, chosen: Callable[[EntryState], bool]
) -> tuple[Sequence[EntryState], Sequence[EntryState]]:
    """Remove what is chosen; returns what went, and what was chosen and is in use. Called for the
    least recently used first."""
    gone: list[EntryState] = []
    kept: list[EntryState] = []
    for state in states(folders):
        if not chosen(state):
            continue
        lock = _unused(state.folder)
        if lock is None:
            kept.append(state)
            continue
        try:
            folders.discard(state.folder)
        finally:
            lock.release()
        gone.append(state)
    return gone, kept


def surplus(
    folders: StoreFolders, limit_bytes: int
) -> tuple[Sequence[EntryState], Sequence[EntryState]]:
    """Remove the least recently used until the rest is within the limit; returns what went, and
    what would have gone and is in use."""
    left_bytes = sum(state.nbytes for state in states(folders))

    def too_much(state: EntryState) -> bool:
        nonlocal left_bytes
        if left_bytes <= limit_bytes:
            return False
        left_bytes -= 0 if state.in_use else state.nbytes
        return True

    return remove_if(folders, too_much)
