"""Reads tensors of a plan into its module: some now, others later, none twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.memory.host.preflight import block_of
from omnistage.memory.plan import LoadPlan, SourceKind, TensorSource
from omnistage.memory.reading import TensorFiles

if TYPE_CHECKING:
    import torch

BytesReporter = Callable[[int], None]
"""Called with the number of bytes that were just loaded."""


class Filler:
    """Of one module. What belongs to a block of `streamed` goes to the host unless said otherwise,
    all else to the plan's device."""

    def __init__(
        self,
        plan: LoadPlan,
        module: torch.nn.Module,
        files: TensorFiles,
        loaded: BytesReporter,
        streamed: tuple[str, ...] = (),
    ) -> None:
        self.plan, self.module, self.streamed = plan, module, streamed
        self._files, self._loaded = files, loaded
        self._filled: set[str] = set()

    def fill(self, names: Iterable[str], device: str | None = None) -> None:
        """Read those of `names` that lie in files or are converted and are not there yet: the
        former in the order of their data, then whole conversions. `device`: where `names` go."""
        wanted = set(names) - self._filled
        targets = {name: device or self._device_of(name) for name in wanted}
        for name, tensor in chain(self._stored(wanted), self._converted(targets)):
            self._put(name, tensor, targets.get(name) or self._device_of(name))

    def count_as_loaded(self, names: Iterable[str]) -> None:
        """Of what somebody else has put in its place."""
        for name in names:
            self._filled.add(name)
            self._loaded(self.plan.sources[name].nbytes)

    def _put(self, name: str, tensor: torch.Tensor, device: str) -> None:
        import torch

        from omnistage.memory.host.modules import put

        dtype = getattr(torch, self.plan.sources[name].dtype)
        put(self.module, name, tensor.to(device, dtype).contiguous())
        self.count_as_loaded([name])

    def _device_of(self, name: str) -> str:
        on_host = block_of(name, self.streamed) is not None
        return "cpu" if on_host else self.plan.sources[name].device

    def _stored(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[Path, list[tuple[int, str, TensorSource]]] = {}
        for name in wanted:
            source = self.plan.sources[name]
            if source.kind is SourceKind.CHECKPOINT:
                by_file.setdefault(source.file, []).append((source.offset_bytes, name, source))
        for file in sorted(by_file):
            for _, name, source in sorted(by_file[file], key=lambda entry: entry[:2]):
                yield name, self._files.read(file, source.key, source.stored_dtype, source.shape)

    def _converted(self, targets: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the library's conversions make, one conversion after another, each where its first
        result goes."""
        import torch

        for entry in self.plan.conversions:
            target = next((targets[name] for name in entry.names if name in targets), None)
            if target is None or not self._filled.isdisjoint(entry.names):
                continue
            device, dtype = "cpu" if entry.on_host else target, getattr(torch, entry.dtype)
            parts = (
                self._files.read(stored.file, stored.key, stored.dtype, stored.shape).to(
                    device, dtype
                )
                for _, stored in entry.parts
            )
            yield from entry.run(parts, self.module).items()
