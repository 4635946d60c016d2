"""The files of an entry: safetensors files in which every block begins on a page and is one run.

The format allows no gaps between tensors, so gaps of images and the rest of a page are tensors of
zeros with reserved names, and the header is filled up with blanks, as the format allows
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omnistage.memory.cache.errors import CacheError
from omnistage.memory.cache.manifest import FILE_PAGE_BYTES, layout_problem
from omnistage.memory.checkpoint import DTYPE_NAMES
from omnistage.memory.host.layout import BlockLayout
from omnistage.memory.offload.host import HostBlock, HostPiece, aligned

SHARD_BYTES = 5 * 2**30
"""Bound of a file, unless one block is larger."""

CHUNK_BYTES = 16 * 2**20
PADDING_PREFIX = "__padding__."
METADATA = {"format": "pt", "made_by": "omnistage weight cache"}

_LENGTH_BYTES = 8
_STORED_NAMES = {name: stored for stored, name in DTYPE_NAMES.items()}
_ZEROS = memoryview(bytes(FILE_PAGE_BYTES))


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """One file: `header` is all bytes before the data, `offsets_bytes` are of each block's image
    from the file's start."""

    name: str
    header: bytes
    blocks: tuple[BlockLayout, ...]
    offsets_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.offsets_bytes[-1] + self.blocks[-1].nbytes


def plan_shards(layouts: Sequence[BlockLayout], shard_bytes: int) -> list[ShardLayout]:
    """Cut blocks, in their order, into files. Raises `CacheError` for images that cannot be."""
    for layout in layouts:
        problem = layout_problem(layout.path, layout.nbytes, layout.places)
        if problem:
            raise CacheError(problem)
    names = [place.name for layout in layouts for place in layout.places]
    if len(set(names)) != len(names) or any(name.startswith(PADDING_PREFIX) for name in names):
        raise CacheError("two tensors have one name, or a name that is reserved for padding")
    groups: list[list[BlockLayout]] = []
    used_bytes = 0
    for layout in layouts:
        nbytes = aligned(layout.nbytes, FILE_PAGE_BYTES)
        if not groups or used_bytes + nbytes > shard_bytes:
            groups.append([])
            used_bytes = 0
        groups[-1].append(layout)
        used_bytes += nbytes
    return [_shard(group, index + 1, len(groups)) for index, group in enumerate(groups)]


def _shard(blocks: Sequence[BlockLayout], number: int, count: int) -> ShardLayout:
    tensors: dict[str, Any] = {"__metadata__": METADATA}
    starts: list[int] = []
    end_bytes = 0
    for block in blocks:
        start_bytes = aligned(end_bytes, FILE_PAGE_BYTES)
        _add_padding(tensors, end_bytes, start_bytes)
        _add_block(tensors, block, start_bytes)
        starts.append(start_bytes)
        end_bytes = start_bytes + block.nbytes
    header = _header(tensors)
    return ShardLayout(
        name=f"weights-{number:05d}-of-{count:05d}.safetensors",
        header=header,
        blocks=tuple(blocks),
        offsets_bytes=tuple(len(header) + start for start in starts),
    )


def _add_block(tensors: dict[str, Any], block: BlockLayout, start_bytes: int) -> None:
    end_bytes = start_bytes
    for place in sorted(block.places, key=lambda place: (place.offset_bytes, place.nbytes)):
        begin = start_bytes + place.offset_bytes
        _add_padding(tensors, end_bytes, begin)
        end_bytes = begin + place.nbytes
        tensors[place.name] = {
            "dtype": _STORED_NAMES[place.dtype],
            "shape": list(place.shape),
            "data_offsets": [begin, end_bytes],
        }
    _add_padding(tensors, end_bytes, start_bytes + block.nbytes)


def _add_padding(tensors: dict[str, Any], begin: int, end: int) -> None:
    if begin < end:
        tensors[f"{PADDING_PREFIX}{begin}"] = {
            "dtype": "U8",
            "shape": [end - begin],
            "data_offsets": [begin, end],
        }


def _header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors, separators=(",", ":")).encode()
    nbytes = aligned(_LENGTH_BYTES + len(text), FILE_PAGE_BYTES) - _LENGTH_BYTES
    return nbytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(nbytes)


def zeros(nbytes: int) -> Iterator[memoryview]:
    while nbytes > 0:
        yield _ZEROS[:nbytes]
        nbytes -= len(_ZEROS)


def image_chunks(block: HostBlock) -> Iterator[memoryview]:
    """The image from its first byte to its last, zeros in the gaps, without a copy.

    Raises `CacheError` when a place is not covered by the block's pieces.
    """
    pieces = sorted(block.pieces, key=lambda piece: piece.offset_bytes)
    end_bytes = 0
    for place in sorted(block.places, key=lambda place: (place.offset_bytes, place.nbytes)):
        yield from zeros(place.offset_bytes - end_bytes)
        end_bytes = place.offset_bytes + place.nbytes
        covered = 0
        for part in _covering(pieces, place.offset_bytes, end_bytes):
            covered += part.nbytes
            yield from _cut(part)
        if covered != place.nbytes:
            raise CacheError(f"the bytes of {place.name} are not all there")
    yield from zeros(block.nbytes - end_bytes)


def _covering(pieces: Iterable[HostPiece], begin: int, end: int) -> Iterator[memoryview]:
    for piece in pieces:
        first = max(begin, piece.offset_bytes)
        last = min(end, piece.offset_bytes + piece.source.numel())
        if first < last:
            part = piece.source[first - piece.offset_bytes : last - piece.offset_bytes]
            yield memoryview(part.numpy())
            begin = last


def _cut(part: memoryview) -> Iterator[memoryview]:
    for start in range(0, part.nbytes, CHUNK_BYTES):
        yield part[start : start + CHUNK_BYTES]
