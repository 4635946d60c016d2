"""Streamed blocks in the checkpoint's own files: what adjoins there is copied as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omnistage.contracts.errors import CheckpointError
from omnistage.memory.checkpoint import StoredTensor, read_header
from omnistage.memory.host.mapping import MappedFile
from omnistage.memory.host.preflight import block_sources, directly_mappable
from omnistage.memory.host.weights import MemoryWeights
from omnistage.memory.offload.host import (
    ALIGNMENT_BYTES,
    HostBacking,
    HostBlock,
    HostPiece,
    TensorPlace,
    aligned,
)
from omnistage.memory.plan import LoadPlan, TensorSource


class DirectWeights(MemoryWeights):
    """Needs no memory of its own: the pages are the system's cache of the files."""

    @classmethod
    def open(cls, plan: LoadPlan, paths: Sequence[str]) -> DirectWeights:
        """Map the files of these blocks, which `directly_mappable` has found to be so.

        Raises `CheckpointError` for a file that is gone, truncated, or changed since the plan.
        """
        refusal = directly_mappable(plan, paths)
        assert refusal is None, f"{plan.component}: {refusal}"
        sources = {path: block_sources(plan, path) for path in paths}
        files: dict[Path, MappedFile] = {}
        try:
            for source in (one for block in sources.values() for one in block.values()):
                assert source.file is not None
                if source.file not in files:
                    files[source.file] = _open(source.file, plan, sources)
            blocks = {path: _block(path, sources[path], files) for path in paths}
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return cls(HostBacking.CHECKPOINT, blocks, tuple(files.values()))


@dataclass(kw_only=True)
class _Run:
    """Tensors that adjoin in a file, each a multiple of the alignment behind the first."""

    file: Path
    start_bytes: int
    stop_bytes: int
    tensors: list[tuple[str, TensorSource]] = field(default_factory=list)

    def takes(self, source: TensorSource) -> bool:
        assert source.offset_bytes is not None
        return (
            source.file == self.file
            and source.offset_bytes == self.stop_bytes
            and (source.offset_bytes - self.start_bytes) % ALIGNMENT_BYTES == 0
        )


def _runs(sources: Mapping[str, TensorSource]) -> list[_Run]:
    runs: list[_Run] = []
    in_file_order = sorted(
        sources.items(), key=lambda entry: (str(entry[1].file), entry[1].offset_bytes)
    )
    for name, source in in_file_order:
        assert source.file is not None
        assert source.offset_bytes is not None
        if not runs or not runs[-1].takes(source):
            start = source.offset_bytes
            runs.append(_Run(file=source.file, start_bytes=start, stop_bytes=start))
        runs[-1].tensors.append((name, source))
        runs[-1].stop_bytes += source.nbytes
    return runs


def _block(
    path: str, sources: Mapping[str, TensorSource], files: Mapping[Path, MappedFile]
) -> HostBlock:
    places: list[TensorPlace] = []
    pieces: list[HostPiece] = []
    offset_bytes = 0
    for run in _runs(sources):
        for name, source in run.tensors:
            assert source.offset_bytes is not None
            place = offset_bytes + source.offset_bytes - run.start_bytes
            places.append(
                TensorPlace(name=name, offset_bytes=place, shape=source.shape, dtype=source.dtype)
            )
        if run.stop_bytes > run.start_bytes:
            source_bytes = files[run.file].bytes[run.start_bytes : run.stop_bytes]
            files[run.file].will_need(run.start_bytes, source_bytes.numel())
            pieces.append(HostPiece(source=source_bytes, offset_bytes=offset_bytes))
        offset_bytes = aligned(offset_bytes + run.stop_bytes - run.start_bytes)
    return HostBlock(path=path, nbytes=offset_bytes, places=tuple(places), pieces=tuple(pieces))


def _open(
    file: Path, plan: LoadPlan, blocks: Mapping[str, Mapping[str, TensorSource]]
) -> MappedFile:
    header = read_header(file)
    for sources in blocks.values():
        for name, source in sources.items():
            if source.file == file and not _is_there(source, header.get(str(source.key))):
                raise CheckpointError(
                    f"{file} changed since it was planned: {source.key!r} is no longer where "
                    f"{name} of {plan.component} was; start again"
                )
    end_bytes = max(stored.offset_bytes + stored.nbytes for stored in header.values())
    return MappedFile(file, expected_bytes=end_bytes)


def _is_there(source: TensorSource, stored: StoredTensor | None) -> bool:
    return stored is not None and (stored.offset_bytes, stored.dtype, stored.shape) == (
        source.offset_bytes,
        source.stored_dtype,
        source.shape,
    )
