"""An entry as it lies on disk: what opening it looks at, and what a full verification reads."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omnistage.memory.cache.errors import CacheError, EntryDamagedError
from omnistage.memory.cache.manifest import (
    FORMAT,
    FileRecord,
    Manifest,
    SealError,
    find_problem,
    unsealed,
)
from omnistage.memory.cache.writer import MANIFEST_NAME

READ_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`folder` is named by the digest of the content."""

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path) -> Entry:
        """Read and check all that is small: the manifest, sizes and headers of files.

        Raises `EntryDamagedError` naming the file, `OSError` when it cannot be read at all.
        """
        manifest = _read_manifest(folder)
        if manifest.format != FORMAT or manifest.content_sha256 != folder.name:
            raise EntryDamagedError(folder.name, f"{MANIFEST_NAME} is of another entry")
        problem = find_problem(manifest)
        if problem:
            raise EntryDamagedError(folder.name, problem)
        for file in manifest.files:
            _check_file(folder, file)
        return cls(folder=folder, manifest=manifest)

    def damages(self) -> Iterator[str]:
        """Read everything; what differs from its digest, by file and block."""
        for file in self.manifest.files:
            path = self.folder / file.name
            if digest_of(path, 0, file.size_bytes) == file.sha256:
                continue
            blocks = [block for block in self.manifest.blocks if block.file == file.name]
            wrong = [
                block.path
                for block in blocks
                if digest_of(path, block.offset_bytes, block.nbytes) != block.sha256
            ]
            yield f"{file.name}: {', '.join(wrong) or 'padding'} differs from its digest"


def _read_manifest(folder: Path) -> Manifest:
    try:
        return unsealed((folder / MANIFEST_NAME).read_bytes(), Manifest)
    except FileNotFoundError as error:
        raise EntryDamagedError(folder.name, f"{MANIFEST_NAME} is missing") from error
    except SealError as error:
        raise EntryDamagedError(folder.name, f"{MANIFEST_NAME} is malformed: {error}") from error


def _check_file(folder: Path, file: FileRecord) -> None:
    path = folder / file.name
    try:
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            raise EntryDamagedError(
                folder.name, f"{file.name} has {size_bytes} bytes, expected {file.size_bytes}"
            )
        if digest_of(path, 0, file.header_bytes) != file.header_sha256:
            raise EntryDamagedError(folder.name, f"{file.name}: its header differs from its digest")
    except FileNotFoundError as error:
        raise EntryDamagedError(folder.name, f"{file.name} is missing") from error


def digest_of(path: Path, offset_bytes: int, nbytes: int) -> str:
    """SHA-256 of a part of a file; a shorter file gives another digest. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return digest_of_open(descriptor, offset_bytes, nbytes)
    finally:
        os.close(descriptor)


def digest_of_open(
    descriptor: int, offset_bytes: int, nbytes: int, stop: threading.Event | None = None
) -> str:
    """The same of an open file.

    Read, not mapped: a file that ends too early or a disk that fails is an error here, where
    touching its mapping would end the process. The pages come into the system's cache all the same.
    Raises `CacheError` when `stop` is set before the end.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(READ_BYTES, max(nbytes, 1))))
    done = 0
    while done < nbytes:
        if stop is not None and stop.is_set():
            raise CacheError("verification was stopped")
        wanted = buffer[: nbytes - done]
        count = os.preadv(descriptor, [wanted], offset_bytes + done)
        if not count:
            break
        digest.update(wanted[:count])
        done += count
    return digest.hexdigest()
