"""The store: entries named by their content, and an index from input keys to them.

    <folder>/entries/<SHA-256 of layout and bytes>/  manifest.json, in_use.lock, *.safetensors
    <folder>/index/<input key>.json                  which entry
    <folder>/locks/                                  who writes which key; who changes the store
    <folder>/tmp/<input key>.<...>/                  entries that are being written

Locks are taken in this order: a key's, the store's, an entry's (without waiting).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omnistage.memory.cache import eviction, index
from omnistage.memory.cache.entry import Entry
from omnistage.memory.cache.errors import CacheError, EntryDamagedError
from omnistage.memory.cache.files import SHARD_BYTES, ShardLayout, plan_shards
from omnistage.memory.cache.folders import StoreFolders
from omnistage.memory.cache.lock import FileLock, locked
from omnistage.memory.cache.weights import CHECK_DEADLINE_S, CachedWeights
from omnistage.memory.cache.writer import (
    IN_USE_NAME,
    EntryFacts,
    sync_folder,
    write_entry,
)
from omnistage.memory.host.layout import BlockLayout
from omnistage.memory.offload.host import HostBlock
from omnistage.memory.plan import gib
from omnistage.observability.logging import get_logger

WAIT_S = 300.0
"""For a process that writes the same entry."""
STORE_LOCK_WAIT_S = 30.0
SPARE_BYTES = 64 * 2**20
"""Left free on the disk besides the entry."""

logger = get_logger(__name__)


class WeightStore:
    """Safe to use from several processes. `limit_bytes` bounds what lies in `entries/`."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int | None = None,
        wait_s: float = WAIT_S,
        shard_bytes: int = SHARD_BYTES,
        check_deadline_s: float = CHECK_DEADLINE_S,
    ) -> None:
        self.folders = StoreFolders(folder)
        self.limit_bytes = limit_bytes
        self._wait_s = wait_s
        self._shard_bytes = shard_bytes
        self._check_deadline_s = check_deadline_s

    def open(self, key: str) -> CachedWeights | None:
        """The entry of an input key, None when there is none. An entry that is damaged is removed.

        While another process writes it, waits; raises `CacheError` when that takes too long, and
        `OSError` when the store cannot be read.
        """
        opened = self._open_now(key)
        if opened is None and self.folders.lock_of(key).exists():
            if not self._wait_for_writer(key):
                return None
            opened = self._open_now(key)
        return opened

    def publish(
        self,
        key: str,
        layouts: Sequence[BlockLayout],
        blocks: Iterable[HostBlock],
        facts: EntryFacts,
        ingredients: Mapping[str, Any] | None = None,
    ) -> CachedWeights:
        """Store these blocks under the key and open them, or join the process that does.

        `blocks` may be made one by one; nothing of them is kept. Raises `CacheError` and `OSError`
        with nothing left behind and the store as it was, but for entries that made room.
        """
        self.folders.make()
        lock = FileLock.acquire(self.folders.lock_of(key), wait_s=self._wait_s)
        if lock is None:
            raise CacheError(f"another process has been writing it for {self._wait_s:g} s")
        try:
            self.folders.remove_stale(key)
            opened = self._open_now(key)
            if opened is not None and opened.layouts == tuple(layouts):
                return opened
            if opened is not None:
                opened.close()
            shards = plan_shards(layouts, self._shard_bytes)
            self._make_room(shards)
            entry = self._write(key, shards, blocks, facts)
            index.enter(self.folders, key, entry, ingredients or {})
            opened = self._open_now(key)
        finally:
            lock.release()
        if opened is None:
            raise CacheError("the entry was removed as soon as it was written")
        return opened

    def _open_now(self, key: str) -> CachedWeights | None:
        name = index.find(self.folders, key)
        if name is None:
            return None
        folder = self.folders.entries / name
        try:
            lock = FileLock.acquire(
                folder / IN_USE_NAME, shared=True, wait_s=STORE_LOCK_WAIT_S, create=False
            )
        except FileNotFoundError:
            if folder.is_dir():
                self._quarantine(folder, None, f"{IN_USE_NAME} is missing")
            return None
        if lock is None:
            raise CacheError(f"{folder / IN_USE_NAME} is locked")
        try:
            weights = CachedWeights(
                Entry.read(folder),
                lock,
                partial(self._quarantine, folder, os.fstat(lock.descriptor).st_ino),
                check_deadline_s=self._check_deadline_s,
            )
        except EntryDamagedError as error:
            self._quarantine(folder, os.fstat(lock.descriptor).st_ino, error.what)
            lock.release()
            return None
        except BaseException:
            lock.release()
            raise
        if not lock.is_of_path():  # taken away, maybe replaced, between one file and the next
            weights.close()
            return None
        weights.start_verifying()
        _touch(lock)
        return weights

    def _wait_for_writer(self, key: str) -> bool:
        """Whether somebody was writing; waits for their end."""
        path = self.folders.lock_of(key)
        free = FileLock.acquire(path, shared=True, create=False)
        if free is not None:
            free.release()
            return False
        logger.info("waiting for another process that writes to the weight cache")
        free = FileLock.acquire(path, shared=True, wait_s=self._wait_s, create=False)
        if free is None:
            raise CacheError(f"another process has been writing it for {self._wait_s:g} s")
        free.release()
        return True

    def _make_room(self, shards: Sequence[ShardLayout]) -> None:
        needed_bytes = sum(shard.size_bytes for shard in shards)
        with locked(self.folders.store_lock, wait_s=STORE_LOCK_WAIT_S):
            self._fit(needed_bytes)
        free_bytes = shutil.disk_usage(self.folders.tmp).free
        if needed_bytes + SPARE_BYTES > free_bytes:
            raise CacheError(
                f"{gib(needed_bytes)} are needed and {gib(free_bytes)} are free on the disk of "
                f"{self.folders.root}; free some, or choose another weight_cache_dir"
            )

    def _fit(self, needed_bytes: int) -> None:
        """Under the store's lock."""
        if self.limit_bytes is not None:
            for gone in eviction.make_room(self.folders, needed_bytes, self.limit_bytes):
                logger.info("weight cache: %s made room (%s)", gone.name[:12], gib(gone.nbytes))

    def _write(
        self,
        key: str,
        shards: Sequence[ShardLayout],
        blocks: Iterable[HostBlock],
        facts: EntryFacts,
    ) -> str:
        """Write aside, then move in place; returns the entry's name."""
        nbytes = sum(shard.size_bytes for shard in shards)
        logger.info("weight cache: writing %s to %s", gib(nbytes), self.folders.root)
        folder = self.folders.new_temporary(key)
        try:
            manifest = write_entry(folder, shards, blocks, facts)
            name = manifest.content_sha256
            with locked(self.folders.store_lock, wait_s=STORE_LOCK_WAIT_S):
                if not self._is_there(name):
                    self._fit(manifest.nbytes)
                    folder.rename(self.folders.entries / name)
                    sync_folder(self.folders.entries)
            return name
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _is_there(self, name: str) -> bool:
        """Whether an entry of this content is there and sound, as far as opening looks. One that is
        not is moved away. Under the store's lock."""
        folder = self.folders.entries / name
        if not folder.exists():
            return False
        try:
            Entry.read(folder)
            return (folder / IN_USE_NAME).exists()
        except EntryDamagedError as error:
            logger.warning("weight cache: %s and is replaced", error)
        self.folders.discard(folder)
        return False

    def _quarantine(self, folder: Path, inode: int | None, what: str) -> None:
        """Take an entry away that is damaged, unless another one has taken its place. Whoever has
        it mapped keeps its pages, and finds out by their own check."""
        logger.error("weight cache: entry %s is damaged: %s", folder.name[:12], what)
        try:
            with locked(self.folders.store_lock, wait_s=STORE_LOCK_WAIT_S):
                lock_file = folder / IN_USE_NAME
                found = lock_file.stat().st_ino if lock_file.exists() else None
                if found == inode and folder.exists():
                    self.folders.discard(folder)
        except OSError as error:
            logger.error("weight cache: it cannot be removed (%s): delete %s", error, folder)


def _touch(lock: FileLock) -> None:
    """Remember the use, for eviction."""
    try:
        os.utime(lock.descriptor)
    except OSError as error:
        logger.debug("weight cache: the time of use is not kept: %s", error)
