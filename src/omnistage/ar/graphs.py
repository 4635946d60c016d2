"""Decode steps as captured graphs, one for each number of rows that batches are padded to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import CapturedGraph, Platform

Forward = Callable[[int], tuple["torch.Tensor", "torch.Tensor"]]
"""size → hidden states (size, hidden_size) and logits (size, vocab_size) of a decode step that its
buffers hold."""


def graph_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 32 beyond; `most` is the last."""
    candidates = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    return tuple(sorted({size for size in candidates if size < most} | {most}))


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: CapturedGraph
    hidden: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Runs `forward(size)` by a captured graph for every size in `sizes`.

    Results lie in the graphs' shared memory: they hold until the next call. Used by one thread.
    What cannot be captured runs as it is, and `describe` says why.
    """

    def __init__(
        self, forward: Forward, platform: Platform, device: str, sizes: tuple[int, ...]
    ) -> None:
        self._forward = forward
        self._platform = platform
        self._device = device
        self._sizes = sizes
        self._captured: dict[int, _Captured] = {}
        self._replays = 0
        self._off_reason = platform.graphs_unavailable_reason()

    def padded(self, rows: int) -> int:
        """The size that a batch of so many rows is padded to."""
        if self._off_reason is not None:
            return rows
        return next((size for size in self._sizes if size >= rows), rows)

    def capture(self, report: Callable[[str, float | None], None]) -> None:
        """Capture all sizes, the largest first, so that the others fit into its memory.

        The buffers must hold a step of padding only. Raises `RuntimeError` where nothing can be
        captured at all.
        """
        if self._off_reason is not None:
            return
        pool = self._platform.graph_pool(self._device)
        stream = self._platform.stream(self._device)
        for done, size in enumerate(reversed(self._sizes)):
            report(f"capturing decode steps of {size} rows", done / len(self._sizes))
            graph, (hidden, logits) = self._platform.capture_graph(
                self._device, lambda size=size: self._forward(size), pool=pool, stream=stream
            )
            self._captured[size] = _Captured(graph, hidden, logits)

    def __call__(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        captured = self._captured.get(size)
        if captured is None:
            return self._forward(size)
        captured.graph.replay()
        self._replays += 1
        return captured.hidden, captured.logits

    def describe(self) -> dict[str, Any]:
        """Sizes captured, replays so far, and why nothing is captured, or None."""
        return {
            "decode_graphs": sorted(self._captured),
            "decode_graph_replays": self._replays,
            "decode_graphs_off": self._off_reason,
        }

    def close(self) -> None:
        """Free all graphs."""
        if self._captured:
            self._platform.synchronize(self._device)
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
