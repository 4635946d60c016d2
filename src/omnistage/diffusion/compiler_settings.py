"""A setting of torch's compiler that exists only for the whole process, changed while needed."""

from __future__ import annotations

import threading

from torch.fx.experimental import _config


class _DistinctSizes:
    """While any thread is inside, the compiler takes equal sizes for a coincidence. Otherwise a
    batch of two, compiled beside rotary embeddings of (tokens, channels, 2), fits no other batch:
    torch.fx calls it duck shaping."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = _config.use_duck_shape
                _config.use_duck_shape = False
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _config.use_duck_shape = self._before


sizes_told_apart = _DistinctSizes()
