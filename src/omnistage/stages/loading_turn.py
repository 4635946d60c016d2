"""Stages of one process load one at a time.

transformers and diffusers import lazily, which fails in one of two threads at once, and a device's
peak memory is measured for one.
"""

from __future__ import annotations

import threading
from typing import Any

from omnistage.contracts.runtime import Executor, LoadReporter

_LOADING = threading.Lock()
_LOOK_S = 0.5


def load_in_turn(executor: Executor, report: LoadReporter) -> dict[str, Any]:
    """The executor's description. `report` is called while others load, too: what it raises ends
    the wait."""
    while not _LOADING.acquire(timeout=_LOOK_S):
        report("waiting for another stage of this process to load", None)
    try:
        return executor.load(report)
    finally:
        _LOADING.release()
