"""The plan of one module: where every parameter and buffer comes from, decided before loading."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.tensors import ITEM_BYTES
from omnistage.memory.conversion import Conversion
from omnistage.memory.names import and_more
from omnistage.memory.skeleton import Implementations, build_skeleton

if TYPE_CHECKING:
    import torch


class SourceKind(StrEnum):
    CHECKPOINT = "checkpoint"
    """Read from a file, cast if the dtypes differ."""
    TIED = "tied"
    """The same tensor as another name's."""
    COMPUTED = "computed"
    """A buffer that the class computes in its constructor and no checkpoint holds."""
    CONVERTED = "converted"
    """Made of several stored tensors, or of a part of one, by a conversion of the library's."""
    LIBRARY = "library"
    """Read by the library's own loader, which loads the whole module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """Where one parameter or buffer comes from, and what it will be.

    `file`, `key`, `offset_bytes` (from the file's start) and `stored_dtype` are set for kind
    "checkpoint", `tied_to` (a name of the same module) for kind "tied".
    """

    kind: SourceKind
    shape: tuple[int, ...]
    dtype: str
    device: str
    file: Path | None = None
    key: str | None = None
    offset_bytes: int | None = None
    stored_dtype: str | None = None
    tied_to: str | None = None

    @property
    def nbytes(self) -> int:
        """What it takes on its device; nothing when tied."""
        if self.kind is SourceKind.TIED:
            return 0
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Skeleton:
    """A module without weights, handed out once; asked again, it is built anew."""

    def __init__(
        self,
        cls: type,
        config: Any,
        folder: Path,
        dtype: str,
        implementations: Implementations | None = None,
        prepare: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:
        """`prepare` changes a module just built (its layers to quantized ones)."""
        self.cls, self.config, self.folder, self.dtype = cls, config, folder, dtype
        self.implementations = implementations or Implementations()
        self._prepare = prepare
        self._module: torch.nn.Module | None = None

    def look(self) -> torch.nn.Module:
        """The module, to read names and shapes from."""
        if self._module is None:
            self._module = build_skeleton(
                self.cls, self.config, self.folder, self.dtype, self.implementations
            )
            if self._prepare is not None:
                self._prepare(self._module)
        return self._module

    def take(self) -> torch.nn.Module:
        """The module, to fill."""
        module, self._module = self.look(), None
        return module


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """One module: a source for every name of its parameters and buffers, persistent or not.

    `dtype` is what was asked for; single tensors may differ, as their class or library demands.
    `unused_keys` are stored tensors that the module has no place for. `gguf_file` is what the
    library's loader reads where sources are of kind "library".
    """

    component: str
    cls: type
    library: str
    folder: Path
    device: str
    dtype: str
    sources: Mapping[str, TensorSource]
    variant: str | None = None
    unused_keys: tuple[str, ...] = ()
    conversions: tuple[Conversion, ...] = field(default=(), repr=False)
    gguf_file: Path | None = None
    skeleton: Skeleton = field(repr=False, compare=False)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_device.values())

    @property
    def bytes_by_device(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for source in self.sources.values():
            totals[source.device] += source.nbytes
        return dict(totals)

    @property
    def by_library(self) -> bool:
        return any(source.kind is SourceKind.LIBRARY for source in self.sources.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """The files it reads, each once, in order."""
        files = [source.file for source in self.sources.values() if source.file is not None]
        files += [stored.file for entry in self.conversions for _, stored in entry.parts]
        return tuple(dict.fromkeys([*files, self.gguf_file] if self.gguf_file else files))

    def describe(self) -> str:
        """A line of what it is and how large, and a line for whatever is out of the ordinary."""
        kinds = Counter(source.kind for source in self.sources.values())
        read = kinds[SourceKind.CHECKPOINT] + sum(len(entry.parts) for entry in self.conversions)
        lines = [
            f"{self.component}: {self.cls.__name__}, {gib(self.total_bytes)} on {self.device}, "
            f"{self.dtype}, {read} tensors from {len(self.files)} file(s)"
        ]
        if self.by_library:
            lines[0] = lines[0].rpartition(", ")[0]
            lines.append(
                f"  loaded by the loader of {self.library}: the tensors of a GGUF file are "
                "dequantized and renamed, which a plan cannot"
            )
        if self.conversions:
            parts = sum(len(entry.parts) for entry in self.conversions)
            lines.append(
                f"  converted while loading: {parts} stored tensors to "
                f"{kinds[SourceKind.CONVERTED]}"
            )
        float8 = sum(source.dtype == "float8_e4m3fn" for source in self.sources.values())
        if float8:
            lines.append(f"  stored in float8, with scales: {float8} weights")
        casts = self._casts()
        if casts:
            lines.append(f"  cast while loading: {', '.join(casts)}")
        apart = [f"{kinds[kind]} {kind}" for kind in (SourceKind.TIED, SourceKind.COMPUTED)]
        apart = [words for words in apart if not words.startswith("0 ")]
        if apart:
            lines.append(f"  besides: {', '.join(apart)}")
        if self.variant:
            lines.append(f"  from the variant {self.variant!r} of its files")
        if self.unused_keys:
            lines.append(f"  stored but unused: {and_more(self.unused_keys)}")
        return "\n".join(lines)

    def _casts(self) -> list[str]:
        counts = Counter(
            (source.stored_dtype, source.dtype)
            for source in self.sources.values()
            if source.stored_dtype not in (None, source.dtype)
        )
        counts.update(
            (stored.dtype, entry.dtype)
            for entry in self.conversions
            for _, stored in entry.parts
            if stored.dtype != entry.dtype
        )
        return [f"{count} {stored} to {wanted}" for (stored, wanted), count in counts.items()]


def gib(nbytes: int) -> str:
    """Bytes for people: MiB below one GiB."""
    if nbytes < 2**30:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**30:.2f} GiB"
