"""The index: which entry an input key leads to."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnistage.memory.cache.folders import StoreFolders
from omnistage.memory.cache.manifest import FORMAT, IndexRecord, SealError, sealed, unsealed
from omnistage.memory.cache.writer import sync_folder, write_durably
from omnistage.observability.logging import get_logger

logger = get_logger(__name__)


def find(folders: StoreFolders, key: str) -> str | None:
    """The entry's name; it may be gone. A malformed index file is as good as none: publishing
    replaces it."""
    path = folders.index_of(key)
    try:
        record = unsealed(path.read_bytes(), IndexRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except SealError as error:
        logger.warning("the weight cache's %s is damaged and not used: %s", path, error)
        return None
    if record.format != FORMAT or record.key != key or Path(record.entry).name != record.entry:
        logger.warning("the weight cache's %s is of something else and not used", path)
        return None
    return record.entry


def enter(folders: StoreFolders, key: str, entry: str, ingredients: Mapping[str, Any]) -> None:
    """Let the key lead to the entry, whatever it led to. For who holds the key's lock."""
    record = IndexRecord(format=FORMAT, key=key, entry=entry, ingredients=ingredients)
    path = folders.index_of(key)
    aside = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        write_durably(aside, sealed(record))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_unreachable(folders: StoreFolders) -> None:
    """Remove what leads to no entry. Under the store's lock."""
    for path in folders.index.glob("*.json"):
        try:
            entry = unsealed(path.read_bytes(), IndexRecord).entry
        except SealError:
            entry = ""
        if not entry or not (folders.entries / entry).is_dir():
            path.unlink(missing_ok=True)
