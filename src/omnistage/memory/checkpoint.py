"""What lies in a checkpoint folder: names, places, shapes and dtypes, read from headers alone.

Only safetensors files are read. The layout of a file is that of the safetensors format
(https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, JSON, data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnistage.contracts.errors import CheckpointError
from omnistage.contracts.tensors import ITEM_BYTES
from omnistage.memory.names import and_more

DTYPE_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""torch's name by safetensors' name of a dtype."""

_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own bound
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_REFUSED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a file: its data are `nbytes` bytes at `offset_bytes` from the file's start."""

    key: str
    file: Path
    offset_bytes: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All tensors of one component's folder, by key. `variant` is what its file names carry."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    variant: str | None = None


def read_checkpoint(
    folder: Path, *, stem: str, variant: str | None = None, index_first: bool = True
) -> Checkpoint:
    """Find and read the headers of a component's safetensors files.

    `stem` is `"diffusion_pytorch_model"` or `"model"`. Without a `variant` the plain files are
    taken, or, where a folder has none, those of its only variant. `index_first` says which wins
    where both a single file and shards are there. Raises `CheckpointError` naming the file.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing: the model's index names it as a component")
    for candidate in [variant] if variant else [None, *_variants(folder, stem)]:
        single = folder / _file_name(f"{stem}.safetensors", candidate)
        index = folder / _file_name(f"{stem}.safetensors.index.json", candidate)
        for path in (index, single) if index_first else (single, index):
            if path.is_file():
                files = _shards(path) if path is index else {single: []}
                return _read_files(folder, files, candidate)
    raise CheckpointError(_nothing_found(folder, stem, variant))


def has_variant(folder: Path, *, stem: str, variant: str) -> bool:
    """Whether a component's folder holds its weights in that variant."""
    names = (f"{stem}.safetensors", f"{stem}.safetensors.index.json")
    return any((folder / _file_name(name, variant)).is_file() for name in names)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, in the order of their data. Reads no data.

    Raises `CheckpointError`, naming the file, when it is missing, truncated or not of the format.
    """
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(len(_LFS_POINTER))
            header_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
            if len(start) < _LENGTH_BYTES or start == _LFS_POINTER:
                raise CheckpointError(_no_header(file, start, size_bytes))
            if header_bytes > min(size_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} is no safetensors file, or a damaged one: its header would take "
                    f"{header_bytes} bytes, the file has {size_bytes}; download it again"
                )
            stream.seek(_LENGTH_BYTES)
            header = _parse_json(file, stream.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + header_bytes
    tensors = [_stored(file, key, entry, data_start) for key, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset_bytes, tensor.nbytes))
    _check_data(file, tensors, data_start, size_bytes)
    return {tensor.key: tensor for tensor in tensors}


def _stored(file: Path, key: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype = DTYPE_NAMES[entry["dtype"]]
        shape = tuple(int(side) for side in entry["shape"])
        begin, end = (int(place) for place in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is corrupt: its header describes tensor {key!r} as {entry!r}; known dtypes: "
            f"{', '.join(DTYPE_NAMES)}"
        ) from error
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype] or min(begin, *shape, 0) < 0:
        raise CheckpointError(
            f"{file} is corrupt: tensor {key!r} of shape {list(shape)} and dtype {dtype} cannot "
            f"take bytes {begin} to {end}"
        )
    return StoredTensor(
        key=key,
        file=file,
        offset_bytes=data_start + begin,
        nbytes=end - begin,
        dtype=dtype,
        shape=shape,
    )


def _check_data(file: Path, tensors: list[StoredTensor], data_start: int, size_bytes: int) -> None:
    """The format allows neither gaps nor overlaps, and the last tensor ends the file."""
    expected = data_start
    for tensor in tensors:
        if tensor.offset_bytes != expected:
            raise CheckpointError(
                f"{file} is corrupt: the data of tensor {tensor.key!r} begin at byte "
                f"{tensor.offset_bytes}, expected {expected}"
            )
        expected += tensor.nbytes
    if size_bytes != expected:
        what = "truncated" if size_bytes < expected else "corrupt"
        raise CheckpointError(
            f"{file} is {what}: its header describes {expected} bytes, the file has "
            f"{size_bytes}; download it again"
        )


def _parse_json(file: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file} is corrupt: no valid JSON where it should be") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file} is corrupt: a JSON object is expected")
    return parsed


def _no_header(file: Path, start: bytes, size_bytes: int) -> str:
    if start == _LFS_POINTER:
        return f"{file} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder"
    return f"{file} is truncated: it has {size_bytes} bytes and no header; download it again"


def _shards(index: Path) -> dict[Path, list[str]]:
    """The files that an index names, with the keys that it expects in each."""
    weight_map = _parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; it must map each key to a file")
    files: dict[Path, list[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} maps {key!r} to {name!r}; a plain file name is allowed")
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}; only safetensors files are loaded")
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index.parent / name} is missing: {index.name} names it; download it again"
            )
        files.setdefault(index.parent / name, []).append(key)
    return files


def _read_files(folder: Path, files: Mapping[Path, list[str]], variant: str | None) -> Checkpoint:
    tensors: dict[str, StoredTensor] = {}
    for file, expected_keys in files.items():
        header = read_header(file)
        lacking = [key for key in expected_keys if key not in header]
        if lacking:
            raise CheckpointError(
                f"{file} lacks {and_more(lacking)}, which the index of its shards promises"
            )
        for key in header:
            if key in tensors:
                raise CheckpointError(f"{file} and {tensors[key].file.name} both hold {key!r}")
        tensors |= header
    return Checkpoint(folder=folder, files=tuple(files), tensors=tensors, variant=variant)


def _file_name(name: str, variant: str | None) -> str:
    """`model.safetensors` becomes `model.fp16.safetensors`; the same rule in both libraries."""
    if variant is None:
        return name
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{variant}.{suffix}"


def _variants(folder: Path, stem: str) -> Iterable[str]:
    """The variant that a folder without plain files offers; none when there are several."""
    singles = {name.split(".")[1] for name in _names(folder, f"{stem}.*.safetensors")}
    indexed = {name.split(".")[-2] for name in _names(folder, f"{stem}.safetensors.index.*.json")}
    found = {name for name in singles | indexed if "-of-" not in name}
    return found if len(found) == 1 else ()


def _nothing_found(folder: Path, stem: str, variant: str | None) -> str:
    wanted = _file_name(f"{stem}.safetensors", variant)
    refused = [name for name in _names(folder, "*") if name.endswith(_REFUSED_SUFFIXES)]
    if refused:
        return (
            f"{folder} holds {and_more(refused)} and no {wanted}; only safetensors files are "
            "loaded, because the other formats can run code or need conversion: convert the model "
            "with `save_pretrained`, or choose a revision that has safetensors files"
        )
    there = and_more(_names(folder, "*.safetensors")) or "no safetensors file"
    return f"{folder} has no {wanted} and no index of shards; found: {there}"


def _names(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))
