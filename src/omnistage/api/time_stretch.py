"""Speech faster or slower at the same pitch, in pieces. Runs in a worker thread."""

from __future__ import annotations

from typing import Any

import av
import numpy as np
from av.filter import Graph

from omnistage.api.audio_frames import checked_samples, frame_of, joined
from omnistage.contracts.errors import InvalidRequestError

MIN_SPEED, MAX_SPEED = 0.25, 4.0

_ATEMPO_RANGE = (0.5, 2.0)
"""Beyond 2 the filter skips samples instead of blending them."""


class TimeStretch:
    """Faster or slower without a change of pitch: `speed` from 0.25 to 4, 1 leaves all as it is.

    float32 mono (n,) in pieces; the pieces that come out need not be as many or as long.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequestError(
                f"speed: {speed} is out of range; allowed: {MIN_SPEED} to {MAX_SPEED}",
                param="speed",
            )
        self._rate_hz = sample_rate
        self._position = 0
        self._graph = None if speed == 1.0 else _atempo_graph(speed, sample_rate)

    def push(self, samples: np.ndarray) -> np.ndarray:
        if self._graph is None or not len(samples):
            return samples
        self._graph.push(frame_of(checked_samples(samples), self._rate_hz, self._position))
        self._position += len(samples)
        return self._drain(self._graph)

    def finish(self) -> np.ndarray:
        if self._graph is None or not self._position:
            return np.zeros(0, np.float32)
        self._graph.push(None)
        return self._drain(self._graph)

    @staticmethod
    def _drain(graph: Graph) -> np.ndarray:
        frames: list[Any] = []
        while True:
            try:
                frames.append(graph.pull())
            except (av.BlockingIOError, av.EOFError):
                return joined(frames)


def _atempo_graph(speed: float, sample_rate: int) -> Graph:
    low, high = _ATEMPO_RANGE
    factors = []
    while speed > high or speed < low:
        factors.append(high if speed > high else low)
        speed /= factors[-1]
    graph = Graph()
    last = graph.add_abuffer(sample_rate=sample_rate, format="fltp", layout="mono")
    for factor in (*factors, speed):
        stage = graph.add("atempo", f"{factor:.6f}")
        last.link_to(stage)
        last = stage
    last.link_to(graph.add("abuffersink"))
    graph.configure()
    return graph
