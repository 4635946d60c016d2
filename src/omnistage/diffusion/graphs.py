"""Calls with device tensors of recurring shapes, captured as graphs and replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.diffusion.graph_keys import NotCapturable, freeze, on_host, thaw
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    import torch

    from omnistage.platforms.base import CapturedGraph, Platform

logger = get_logger(__name__)

CAPTURED_AT_USE = 12
"""A capture costs what about so many replays save (0.19 s and 14 ms on an H200 at 512 x 512, both
guidance branches): a composition that does not last so long had better not be captured."""
_REMEMBERED_PER_GRAPH = 16


@dataclass(kw_only=True)
class _Captured:
    graph: CapturedGraph
    inputs: list[torch.Tensor]
    output: torch.Tensor


class GraphCache:
    """Runs `work(**inputs)`, from use number `captured_at_use` by a captured graph where it can.

    At most `max_graphs` are held; the one not used for longest goes. All share one pool of memory,
    so results are copied out of it. What cannot be captured runs as before, and `describe` says
    why. Used by one thread; `work` must read no device tensor but its arguments and weights.
    """

    def __init__(
        self,
        work: Callable[..., torch.Tensor],
        platform: Platform,
        device: str,
        max_graphs: int,
        *,
        captured_at_use: int = CAPTURED_AT_USE,
        by_value: Callable[[torch.Tensor], bool] = on_host,
    ) -> None:
        self._work = work
        self._platform = platform
        self._device = device
        self._max_graphs = max_graphs
        self._captured_at_use = captured_at_use
        self._by_value = by_value
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self._uncaptured: OrderedDict[Hashable, str] = OrderedDict()
        self._pool: Any = None
        self._stream: Any = None
        self._off_reason = platform.graphs_unavailable_reason()
        self._captures = 0
        self._replays = 0

    def __call__(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        if self._off_reason is not None:
            return self._work(**inputs)
        tensors: list[torch.Tensor] = []
        try:
            key = freeze(inputs, tensors, self._by_value)
        except NotCapturable as error:
            self._leave_uncaptured(str(error), str(error))
            return self._work(**inputs)
        captured = self._graphs.get(key)
        if captured is None and self._is_due(key):
            captured = self._try_capture(key, inputs, tensors)
        if captured is None:
            return self._work(**inputs)
        return self._replay(key, captured, tensors)

    def describe(self) -> dict[str, Any]:
        """ "graphs" held, "captures" and "replays" so far, "uncaptured": how many kinds of call
        stay so by reason, "off": why nothing is captured any more, or None."""
        reasons = list(self._uncaptured.values())
        return {
            "graphs": len(self._graphs),
            "captures": self._captures,
            "replays": self._replays,
            "uncaptured": {reason: reasons.count(reason) for reason in reasons},
            "off": self._off_reason,
        }

    def clear(self) -> None:
        """Free all graphs. Needed when weights move: a graph knows them by their address."""
        if self._graphs:
            self._platform.synchronize(self._device)
        while self._graphs:
            self._graphs.popitem()[1].graph.reset()
        self._uses.clear()
        self._pool = self._stream = None

    def _is_due(self, key: Hashable) -> bool:
        if key in self._uncaptured:
            return False
        self._uses[key] = self._uses.get(key, 0) + 1
        self._uses.move_to_end(key)
        self._forget_oldest(self._uses)
        return self._uses[key] >= self._captured_at_use

    def _try_capture(
        self, key: Hashable, inputs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> _Captured | None:
        import torch

        try:
            return self._capture(key, inputs, tensors)
        except torch.OutOfMemoryError as error:
            self._turn_off(f"out of memory while capturing: {_first_line(error)}")
        except RuntimeError as error:
            self._turn_off(f"a capture failed: {_first_line(error)}")
        return None

    def _capture(
        self, key: Hashable, inputs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> _Captured:
        if self._pool is None:
            self._pool = self._platform.graph_pool(self._device)
            self._stream = self._platform.stream(self._device)
        while len(self._graphs) >= self._max_graphs:
            self._drop_oldest_graph()
        buffers = [tensor.clone() for tensor in tensors]
        arguments = thaw(inputs, list(buffers), self._by_value)
        graph, output = self._platform.capture_graph(
            self._device,
            lambda: self._work(**arguments),
            pool=self._pool,
            stream=self._stream,
        )
        captured = _Captured(graph=graph, inputs=buffers, output=output)
        self._graphs[key] = captured
        self._uses.pop(key, None)
        self._captures += 1
        return captured

    def _replay(
        self, key: Hashable, captured: _Captured, tensors: list[torch.Tensor]
    ) -> torch.Tensor:
        self._graphs.move_to_end(key)
        for buffer, tensor in zip(captured.inputs, tensors, strict=True):
            buffer.copy_(tensor)
        captured.graph.replay()
        self._replays += 1
        return captured.output.clone()

    def _drop_oldest_graph(self) -> None:
        self._platform.synchronize(self._device)
        _, oldest = self._graphs.popitem(last=False)
        oldest.graph.reset()

    def _turn_off(self, reason: str) -> None:
        self.clear()
        self._platform.empty_cache(self._device)
        self._off_reason = reason
        logger.warning("captured graphs are off from now on: %s", reason)

    def _leave_uncaptured(self, key: Hashable, reason: str) -> None:
        if reason not in self._uncaptured.values():
            logger.warning("a call of the denoiser runs without a captured graph: %s", reason)
        self._uncaptured[key] = reason
        self._uses.pop(key, None)
        self._forget_oldest(self._uncaptured)

    def _forget_oldest(self, remembered: OrderedDict[Hashable, Any]) -> None:
        while len(remembered) > _REMEMBERED_PER_GRAPH * self._max_graphs:
            remembered.popitem(last=False)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
