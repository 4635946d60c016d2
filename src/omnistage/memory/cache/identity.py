"""What decides the bytes of a component's streamed blocks: the ingredients of an input key.

A key only saves the reading of everything; content alone decides what an entry is. So what is
missing here costs at most a wrong hit, and what is too much only a second publication, which finds
its content there. Paths, inodes and devices are left out: the same model at another place, in a
container or copied with its times, is the same. For files that agree in names, sizes, times and
headers, which fine-tuned models with normalized times do, a sample of every tensor decides.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage import __version__
from omnistage.memory.cache.manifest import FORMAT
from omnistage.memory.host.layout import BlockLayout
from omnistage.memory.plan import LoadPlan

if TYPE_CHECKING:
    from omnistage.parallel.topology import Topology

SAMPLE_BYTES = 4096
VOLATILE_SETTINGS = frozenset({"_name_or_path", "_commit_hash"})
"""Where a configuration was read from: no part of what it says."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What a rank's place says of its weights. Data-parallel places, and the place in a sequence
    group, are left out: those ranks hold the same. The implementation and the size of sequence
    parallelism are a guard, since it may exchange modules."""

    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    sequence_parallel: str = "none"
    sequence_parallel_size: int = 1

    @classmethod
    def of(cls, topology: Topology, rank: int) -> RankShare:
        degrees = {name: topology.size(name) for name in ("ring", "sequence")}
        used = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
        return cls(
            tensor_parallel_size=topology.size("tensor"),
            tensor_parallel_rank=topology.coordinates(rank)["tensor"],
            sequence_parallel="+".join(used) or "none",
            sequence_parallel_size=degrees["ring"] * degrees["sequence"],
        )


def ingredients_of(
    plan: LoadPlan,
    layouts: Iterable[BlockLayout],
    transform_key: str | None,
    share: RankShare,
) -> dict[str, Any]:
    """All that an input key is made of, as plain values. Reads headers and a sample of every
    tensor of the plan's files. Raises `OSError`."""
    return {
        "format": FORMAT,
        "component_class": f"{plan.cls.__module__}.{plan.cls.__qualname__}",
        "config": plain_config(plan.skeleton.config),
        "dtype": plan.dtype,
        "files": [_file(path, plan) for path in plan.files],
        "sources": _sources(plan),
        "layouts": [asdict(layout) for layout in layouts],
        "transform": transform_key,
        "libraries": libraries(plan),
        "share": asdict(share),
    }


def input_key(ingredients: Mapping[str, Any]) -> str:
    """SHA-256 of the ingredients, whatever their order."""
    return hashlib.sha256(_canonical(ingredients)).hexdigest()


def summary(ingredients: Mapping[str, Any]) -> dict[str, Any]:
    """Ingredients for people: long lists as digests."""
    short = dict(ingredients)
    for name in ("config", "sources", "layouts"):
        short[name] = hashlib.sha256(_canonical(ingredients[name])).hexdigest()
    return short


def libraries(plan: LoadPlan) -> dict[str, str]:
    """Versions of whatever casts, converts and names tensors."""
    names = sorted({"torch", "diffusers", "transformers", plan.library})
    return {"omnistage": __version__} | {name: metadata.version(name) for name in names}


def plain_config(config: Any) -> Any:
    """A configuration as plain values, without where it was read from. Sets, whose order differs
    between processes, are sorted."""
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return _without_volatile(values)


def _without_volatile(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(name): _without_volatile(inner)
            for name, inner in value.items()
            if name not in VOLATILE_SETTINGS
        }
    if isinstance(value, list | tuple):
        return [_without_volatile(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((_without_volatile(inner) for inner in value), key=_canonical)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sources(plan: LoadPlan) -> list[Any]:
    """Of every name: what is read and what it is cast to; and what conversions take and make."""
    tensors = [
        (name, one.kind, one.key, one.stored_dtype, one.dtype, one.shape, one.tied_to)
        for name, one in plan.sources.items()
    ]
    conversions = [
        (
            one.names,
            one.dtype,
            [stored.key for _, stored in one.parts],
            type(one.converter).__name__,
        )
        for one in plan.conversions
    ]
    return [sorted(tensors, key=lambda entry: entry[0]), conversions]


def _file(path: Path, plan: LoadPlan) -> dict[str, Any]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        return {
            "name": path.name,
            "size_bytes": facts.st_size,
            "mtime_ns": facts.st_mtime_ns,
            "header_sha256": _header_digest(descriptor, facts.st_size),
            "sample_sha256": _sample_digest(descriptor, _offsets(path, plan, facts.st_size)),
        }
    finally:
        os.close(descriptor)


def _header_digest(descriptor: int, size_bytes: int) -> str:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = os.pread(descriptor, min(length, size_bytes, 100_000_000), 8)
    return hashlib.sha256(header).hexdigest()


def _offsets(path: Path, plan: LoadPlan, size_bytes: int) -> list[int]:
    """Where tensors begin; for files that only a library reads, places spread evenly."""
    stored = [one.offset_bytes for one in plan.sources.values() if one.file == path]
    stored += [
        part.offset_bytes for one in plan.conversions for _, part in one.parts if part.file == path
    ]
    offsets = [offset for offset in stored if offset is not None]
    return sorted(set(offsets)) or list(range(0, size_bytes, max(size_bytes // 256, 1)))


def _sample_digest(descriptor: int, offsets_bytes: Iterable[int]) -> str:
    digest = hashlib.sha256()
    for offset_bytes in offsets_bytes:
        digest.update(os.pread(descriptor, SAMPLE_BYTES, offset_bytes))
    return digest.hexdigest()
