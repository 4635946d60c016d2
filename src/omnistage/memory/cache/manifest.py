"""What an entry and an index file say, and the seal that tells whether they still do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from omnistage.contracts.tensors import ITEM_BYTES
from omnistage.memory.offload.host import ALIGNMENT_BYTES, TensorPlace

FORMAT = 1
"""Of entries and of input keys: changed whenever either changes its meaning."""

FILE_PAGE_BYTES = 4096
"""Blocks begin at multiples of it in their file, whatever the page size of the machine."""

Sealable = TypeVar("Sealable")


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block's image: `nbytes` bytes at `offset_bytes` of `file`; gaps between places are zero."""

    path: str
    nbytes: int
    places: tuple[TensorPlace, ...]
    file: str
    offset_bytes: int
    sha256: str


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`header_bytes` is all that stands before the data."""

    name: str
    size_bytes: int
    sha256: str
    header_bytes: int
    header_sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`content_sha256` names the entry. `first_key` is the input key that it was made for; other
    keys may lead to it. `created_s` is in seconds since 1970."""

    format: int
    content_sha256: str
    component: str
    component_class: str
    first_key: str
    created_s: float
    libraries: Mapping[str, str]
    blocks: tuple[BlockRecord, ...]
    files: tuple[FileRecord, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class IndexRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From an input key to an entry. `ingredients` are what the key was made of, for people."""

    format: int
    key: str
    entry: str
    ingredients: Mapping[str, Any]


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: str
    content: msgspec.Raw


class SealError(ValueError):
    """A sealed file is malformed, or not what was sealed."""


def sealed(record: msgspec.Struct) -> bytes:
    """The record as JSON, with its own digest."""
    content = msgspec.json.encode(record)
    digest = hashlib.sha256(content).hexdigest()
    return msgspec.json.encode(_Sealed(sha256=digest, content=msgspec.Raw(content)))


def unsealed(data: bytes, kind: type[Sealable]) -> Sealable:
    """Raises `SealError`."""
    try:
        outer = msgspec.json.decode(data, type=_Sealed)
        content = bytes(outer.content)
        if hashlib.sha256(content).hexdigest() != outer.sha256:
            raise SealError("its digest differs from its content")
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SealError(str(error)) from error


def content_digest(blocks: Sequence[BlockRecord]) -> str:
    """Of layout and bytes alone: the same content has the same name, whatever it was made for and
    however it is cut into files."""
    described = [(block.path, block.nbytes, block.places, block.sha256) for block in blocks]
    return hashlib.sha256(msgspec.json.encode((FORMAT, described))).hexdigest()


def find_problem(manifest: Manifest) -> str | None:
    """What contradicts itself in a manifest, None when nothing does."""
    if content_digest(manifest.blocks) != manifest.content_sha256:
        return "manifest.json does not belong to the name of the entry"
    sizes = {file.name: file for file in manifest.files}
    if any(Path(name).name != name for name in sizes):
        return "manifest.json names files elsewhere"
    for block in manifest.blocks:
        file = sizes.get(block.file)
        begin, end = block.offset_bytes, block.offset_bytes + block.nbytes
        if file is None or not file.header_bytes <= begin <= end <= file.size_bytes:
            return f"manifest.json places {block.path} where no file is"
        if begin % FILE_PAGE_BYTES:
            return f"manifest.json places {block.path} amid a page"
        problem = layout_problem(block.path, block.nbytes, block.places)
        if problem:
            return problem
    return None


def layout_problem(path: str, nbytes: int, places: Sequence[TensorPlace]) -> str | None:
    """What is wrong with an image's places: they are aligned, apart and inside."""
    end_bytes = 0
    for place in sorted(places, key=lambda place: (place.offset_bytes, place.nbytes)):
        if place.dtype not in ITEM_BYTES:
            return f"{place.name} has the unknown dtype {place.dtype}"
        if place.offset_bytes < end_bytes or place.offset_bytes % ALIGNMENT_BYTES:
            return f"{place.name} overlaps another tensor of {path}, or is not aligned"
        end_bytes = place.offset_bytes + place.nbytes
    return f"{path} ends after its image" if end_bytes > nbytes else None
