"""Captured graphs played on the CPU: a replay does the recorded work again, into one result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tests.platforms.fakes import FakePlatform


class PlayedGraph:
    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self.output = torch.full_like(work(), float("nan"))
        self.is_reset = False

    def replay(self) -> None:
        assert not self.is_reset
        self.output.copy_(self._work())

    def reset(self) -> None:
        self.is_reset = True


class GraphPlatform(FakePlatform):
    """Its results hold NaN until a replay, and the same memory after each."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[PlayedGraph] = []
        self.pools: set[Any] = set()
        self.caches_emptied = 0
        self.failure: Exception | None = None

    def graphs_unavailable_reason(self) -> str | None:
        return None

    def graph_pool(self, device: str) -> Any:
        return object()

    def capture_graph(
        self, device: str, work: Callable[[], Any], *, pool: Any, stream: Any
    ) -> tuple[PlayedGraph, Any]:
        if self.failure is not None:
            raise self.failure
        self.pools.add(pool)
        graph = PlayedGraph(work)
        self.graphs.append(graph)
        return graph, graph.output

    def empty_cache(self, device: str) -> None:
        self.caches_emptied += 1

    @contextmanager
    def failing(self, failure: Exception):
        self.failure = failure
        try:
            yield
        finally:
            self.failure = None
