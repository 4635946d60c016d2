"""The folders of a store, and what lies in them for a time."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from omnistage.memory.cache.lock import FileLock


class StoreFolders:
    """Paths below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries = root / "entries"
        self.index = root / "index"
        self.locks = root / "locks"
        self.tmp = root / "tmp"
        self.store_lock = self.locks / "store.lock"

    def make(self) -> None:
        for folder in (self.entries, self.index, self.locks, self.tmp):
            folder.mkdir(parents=True, exist_ok=True)

    def lock_of(self, key: str) -> Path:
        return self.locks / f"{key}.lock"

    def index_of(self, key: str) -> Path:
        return self.index / f"{key}.json"

    def new_temporary(self, key: str) -> Path:
        folder = self.tmp / f"{key}.{uuid.uuid4().hex}"
        folder.mkdir()
        return folder

    def remove_stale(self, key: str) -> None:
        """What a writer of this key left that died. Only for who holds the key's lock."""
        for path in self.tmp.glob(f"{key}.*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def remove_all_stale(self) -> int:
        """The same for every key that nobody is writing; returns how many."""
        removed = 0
        for folder in list(self.tmp.glob("*")):
            lock = FileLock.acquire(self.lock_of(folder.name.split(".")[0]))
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
                lock.release()
        return removed

    def discard(self, folder: Path) -> None:
        """Move an entry out of sight at once, then delete it. Under the store's lock."""
        aside = self.tmp / f"removed.{uuid.uuid4().hex}"
        folder.rename(aside)
        shutil.rmtree(aside)
