"""Writes an entry into a folder, block after block: nothing but chunks of it is held besides."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from omnistage.memory.cache.errors import CacheError
from omnistage.memory.cache.files import ShardLayout, image_chunks, zeros
from omnistage.memory.cache.manifest import (
    FORMAT,
    BlockRecord,
    FileRecord,
    Manifest,
    content_digest,
    sealed,
)
from omnistage.memory.offload.host import HostBlock

MANIFEST_NAME = "manifest.json"
IN_USE_NAME = "in_use.lock"
READ_ONLY = 0o444


@dataclass(frozen=True, kw_only=True)
class EntryFacts:
    """What a manifest says of where its content comes from."""

    component: str
    component_class: str
    first_key: str
    libraries: Mapping[str, str]


class Hashing:
    """Digests of a stream beside each other: hashlib lets go of the interpreter for long chunks."""

    LONG_BYTES = 2**20

    def __init__(self, pool: ThreadPoolExecutor, output: IO[bytes]) -> None:
        self._pool = pool
        self._output = output
        self.file = hashlib.sha256()

    def write(self, chunk: Any, *others: Any) -> None:
        """Write it, and add it to the file's digest and to `others`."""
        digests = (self.file, *others)
        if len(chunk) < self.LONG_BYTES:
            self._output.write(chunk)
            for digest in digests:
                digest.update(chunk)
            return
        running = [self._pool.submit(digest.update, chunk) for digest in digests]
        try:
            self._output.write(chunk)
        finally:
            for future in running:
                future.result()


def write_entry(
    folder: Path,
    shards: Sequence[ShardLayout],
    blocks: Iterable[HostBlock],
    facts: EntryFacts,
) -> Manifest:
    """Write the files, the manifest and the lock file into `folder`, and make them durable.

    `blocks` come in the order of the shards. Raises `OSError`, and `CacheError` when a block has
    another layout than its shard planned.
    """
    records: list[BlockRecord] = []
    files: list[FileRecord] = []
    remaining = iter(blocks)
    with ThreadPoolExecutor(2, "weight-cache-write") as pool:
        for shard in shards:
            files.append(_write_shard(folder / shard.name, shard, remaining, records, pool))
    manifest = Manifest(
        format=FORMAT,
        content_sha256=content_digest(records),
        component=facts.component,
        component_class=facts.component_class,
        first_key=facts.first_key,
        created_s=time.time(),
        libraries=facts.libraries,
        blocks=tuple(records),
        files=tuple(files),
    )
    write_durably(folder / MANIFEST_NAME, sealed(manifest))
    (folder / MANIFEST_NAME).chmod(READ_ONLY)
    write_durably(folder / IN_USE_NAME, b"")
    sync_folder(folder)
    return manifest


def _write_shard(
    path: Path,
    shard: ShardLayout,
    blocks: Iterable[HostBlock],
    records: list[BlockRecord],
    pool: ThreadPoolExecutor,
) -> FileRecord:
    with path.open("xb") as output:
        hashing = Hashing(pool, output)
        hashing.write(shard.header)
        end_bytes = len(shard.header)
        for layout, offset_bytes in zip(shard.blocks, shard.offsets_bytes, strict=True):
            block = next(iter(blocks), None)
            if block is None or (block.path, block.nbytes, block.places) != (
                layout.path,
                layout.nbytes,
                layout.places,
            ):
                raise CacheError(f"{layout.path} has another layout than planned")
            for chunk in zeros(offset_bytes - end_bytes):
                hashing.write(chunk)
            digest = hashlib.sha256()
            for chunk in image_chunks(block):
                hashing.write(chunk, digest)
            end_bytes = offset_bytes + layout.nbytes
            records.append(
                BlockRecord(
                    path=layout.path,
                    nbytes=layout.nbytes,
                    places=layout.places,
                    file=shard.name,
                    offset_bytes=offset_bytes,
                    sha256=digest.hexdigest(),
                )
            )
        _make_durable(output)
    path.chmod(READ_ONLY)
    return FileRecord(
        name=shard.name,
        size_bytes=shard.size_bytes,
        sha256=hashing.file.hexdigest(),
        header_bytes=len(shard.header),
        header_sha256=hashlib.sha256(shard.header).hexdigest(),
    )


def write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as output:
        output.write(data)
        _make_durable(output)


def _make_durable(output: IO[bytes]) -> None:
    output.flush()
    os.fsync(output.fileno())


def sync_folder(folder: Path) -> None:
    """Make names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
