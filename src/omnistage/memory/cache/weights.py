"""An entry that is in use: its files mapped, its blocks verified in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from omnistage.contracts.errors import CheckpointError, DeadlineExceededError
from omnistage.memory.cache.entry import Entry, digest_of_open
from omnistage.memory.cache.errors import CacheError
from omnistage.memory.cache.lock import FileLock
from omnistage.memory.cache.manifest import BlockRecord
from omnistage.memory.host.layout import BlockLayout
from omnistage.memory.host.mapping import MappedFile
from omnistage.memory.host.weights import MemoryWeights
from omnistage.memory.offload.host import HostBacking, HostBlock, HostPiece
from omnistage.observability.logging import get_logger

CHECK_DEADLINE_S = 600.0
VERIFYING_THREADS = 8

logger = get_logger(__name__)


class CachedWeights(MemoryWeights):
    """Owns the shared lock that keeps the entry from being evicted.

    `on_damage` is called once, with what is wrong, when a block's bytes are not those that were
    stored; whoever then asks for any block of the entry that is not verified yet, or for that one,
    gets a `CheckpointError`.
    """

    def __init__(
        self,
        entry: Entry,
        lock: FileLock,
        on_damage: Callable[[str], None],
        *,
        check_deadline_s: float = CHECK_DEADLINE_S,
    ) -> None:
        self.entry = entry
        self._lock = lock
        self._on_damage = on_damage
        self._deadline_s = check_deadline_s
        self._stop = threading.Event()
        self._once = threading.Lock()
        self._damage: str | None = None
        with ExitStack() as undoing:
            files, self._descriptors = _open_files(entry, undoing)
            blocks = {record.path: _block(record, files) for record in entry.manifest.blocks}
            super().__init__(HostBacking.RUNTIME_CACHE, blocks, tuple(files.values()))
            undoing.pop_all()
        self._pool = ThreadPoolExecutor(
            min(VERIFYING_THREADS, os.cpu_count() or 1), "weight-cache-verify"
        )
        self._verdicts: dict[str, Future[str | None]] = {}

    def start_verifying(self) -> None:
        """Every block, in the order of their use. Before this there is nothing to `check`."""
        for record in self.entry.manifest.blocks:
            self._verdicts[record.path] = self._pool.submit(self._verify, record)
        self._pool.shutdown(wait=False)

    @property
    def layouts(self) -> tuple[BlockLayout, ...]:
        return tuple(
            BlockLayout(path=record.path, places=record.places, nbytes=record.nbytes)
            for record in self.entry.manifest.blocks
        )

    def check(self, path: str) -> None:
        """Raises `DeadlineExceededError` when reading the block takes longer than the deadline."""
        verdict = self._verdicts[path]
        try:
            problem = verdict.result(self._deadline_s)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"block {path} of the weight cache was not read within {self._deadline_s:g} s; its "
                "disk may be too slow: choose another weight_cache_dir, or switch the cache off"
            ) from error
        if problem:
            raise CheckpointError(
                f"the weight cache's copy of {path} was damaged ({problem}) and has been removed; "
                "start again to load from the checkpoint"
            )

    def close(self) -> None:
        self._stop.set()
        for verdict in self._verdicts.values():
            verdict.cancel()
        self._pool.shutdown(wait=True)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        try:
            super().close()
        finally:
            self._lock.release()

    def _verify(self, record: BlockRecord) -> str | None:
        """What is wrong with the block. A failure to read it counts as damage."""
        if self._damage:
            return self._damage
        descriptor = self._descriptors[record.file]
        try:
            found = digest_of_open(descriptor, record.offset_bytes, record.nbytes, self._stop)
        except CacheError:
            return "it was closed"
        except OSError as error:
            return self._damaged(f"{record.file} cannot be read: {error.strerror}")
        if found != record.sha256:
            return self._damaged(f"{record.file}: {record.path} differs from its digest")
        return None

    def _damaged(self, problem: str) -> str:
        with self._once:
            if self._damage is None:
                self._damage = problem
                self._on_damage(problem)
        return problem


def _open_files(entry: Entry, undoing: ExitStack) -> tuple[dict[str, MappedFile], dict[str, int]]:
    """Every file mapped, and open to be read: what is verified is what is mapped, also after the
    entry was taken away."""
    files: dict[str, MappedFile] = {}
    descriptors: dict[str, int] = {}
    for file in entry.manifest.files:
        path = entry.folder / file.name
        files[file.name] = MappedFile(path, expected_bytes=file.size_bytes)
        undoing.callback(files[file.name].close)
        descriptors[file.name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        undoing.callback(os.close, descriptors[file.name])
    return files, descriptors


def _block(record: BlockRecord, files: dict[str, MappedFile]) -> HostBlock:
    source = files[record.file].bytes[record.offset_bytes : record.offset_bytes + record.nbytes]
    return HostBlock(
        path=record.path,
        nbytes=record.nbytes,
        places=record.places,
        pieces=(HostPiece(source=source, offset_bytes=0),) if record.nbytes else (),
    )
