"""A codec's step as captured graphs: one for each number of streams and size of pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import CapturedGraph, Platform

Step = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""rows (B,), frames before (B,), codes (B, k, G), all int64 on the device → waveforms (B, n)."""


@dataclass(slots=True, kw_only=True)
class _Captured:
    graph: CapturedGraph
    rows: torch.Tensor
    before: torch.Tensor
    codes: torch.Tensor
    waves: torch.Tensor


class CapturedSteps:
    """Replays `step` for batches of up to `max_batch` streams and pieces of the given sizes; runs
    it as it is for others. A batch is padded to the next power of two with `spare_row`.

    The result is overwritten by the next call: whoever needs it longer has a copy in order.
    """

    def __init__(
        self,
        step: Step,
        platform: Platform,
        device: str,
        *,
        max_batch: int,
        sizes: Sequence[int],
        num_codebooks: int,
        spare_row: int,
    ) -> None:
        self.sizes = tuple(sorted(sizes))
        self._step = step
        self._platform = platform
        self._device = device
        self._batches = batch_buckets(max_batch)
        self._num_codebooks = num_codebooks
        self._spare_row = spare_row
        self._graphs: dict[tuple[int, int], _Captured] = {}

    def capture(self, report: Callable[[str, float | None], None]) -> None:
        """All of them, the largest first, so that the rest fits into its memory."""
        pool = self._platform.graph_pool(self._device)
        stream = self._platform.stream(self._device)
        shapes = [(batch, size) for batch in self._batches for size in self.sizes]
        shapes.sort(key=lambda shape: -shape[0] * shape[1])
        for index, (batch, size) in enumerate(shapes):
            report("capturing the codec decoder", index / len(shapes))
            self._graphs[batch, size] = self._capture(batch, size, pool, stream)

    def __call__(
        self, rows: torch.Tensor, before: torch.Tensor, codes: torch.Tensor
    ) -> torch.Tensor:
        count = len(rows)
        batch = next((batch for batch in self._batches if batch >= count), count)
        captured = self._graphs.get((batch, codes.shape[1]))
        if captured is None:
            return self._step(rows, before, codes)
        captured.rows[count:] = self._spare_row
        captured.rows[:count] = rows
        captured.before[:count] = before
        captured.codes[:count] = codes
        captured.graph.replay()
        return captured.waves[:count]

    def clear(self) -> None:
        if self._graphs:
            self._platform.synchronize(self._device)
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()

    def _capture(self, batch: int, size: int, pool: Any, stream: Any) -> _Captured:
        import torch

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self._device)

        rows, before = zeros(batch) + self._spare_row, zeros(batch)
        codes = zeros(batch, size, self._num_codebooks)
        graph, waves = self._platform.capture_graph(
            self._device, lambda: self._step(rows, before, codes), pool=pool, stream=stream
        )
        return _Captured(graph=graph, rows=rows, before=before, codes=codes, waves=waves)


def batch_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4 … and `most` itself."""
    buckets = []
    size = 1
    while size < most:
        buckets.append(size)
        size *= 2
    return (*buckets, most)
