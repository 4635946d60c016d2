"""Times of operations and the rate of the link, found by trying on the device itself."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.planning.times import roofline_s

if TYPE_CHECKING:
    from omnistage.memory.planning.facts import DeviceFacts
    from omnistage.memory.planning.signatures import OpSignature
    from omnistage.platforms.base import Platform

logger = logging.getLogger(__name__)

LIMIT_S = 3.0
REPEAT_S = 0.004
"""How long one operation is repeated for."""
MAX_REPEATS = 200
LINK_ROUNDS = 5
LINK_BYTES = 256 * 2**20


def measure_ops(
    ops: Counter[OpSignature],
    platform: Platform,
    facts: DeviceFacts,
    *,
    cache: Path | None = None,
    limit_s: float = LIMIT_S,
) -> dict[OpSignature, float]:
    """Seconds of each distinct operation, those first that matter most, until `limit_s` is over.

    What is in `cache`, a file of `OpTimeCache`, is not tried again. Operations that cannot be
    repeated, or fail, are left out. Takes device memory for one operation at a time.
    """
    store = OpTimeCache(cache, facts.label) if cache is not None else None
    known = store.read() if store is not None else {}
    kept = len(known)
    found: dict[OpSignature, float] = {}
    end = time.monotonic() + limit_s
    for op in sorted(ops, key=lambda op: -ops[op] * roofline_s(op, facts)):
        seconds = known.get(op.key)
        if seconds is None and time.monotonic() < end:
            seconds = _try(op, platform, facts.device)
        if seconds is not None:
            found[op] = known[op.key] = seconds
    platform.empty_cache(facts.device)
    if store is not None and len(known) > kept:
        store.write(known)
    return found


def measure_link(platform: Platform, device: str, nbytes: int = LINK_BYTES) -> float:
    """Bytes a second of a copy of `nbytes` from page-locked memory, the best of a few.

    Raises `UnsupportedCombinationError` where the platform locks no pages.
    """
    import torch

    from omnistage.memory.host.mapping import AnonymousMemory
    from omnistage.memory.host.page_lock import PageLocks, pages_of

    memory = AnonymousMemory(nbytes)
    try:
        memory.bytes.fill_(1)
        locks = PageLocks.acquire(pages_of(memory, [memory.bytes]), platform, device, None)
        if locks is None:
            raise UnsupportedCombinationError(f"{device} copies from no page-locked memory")
        try:
            image = torch.empty(nbytes, dtype=torch.uint8, device=device)
            copy = _timed(lambda: platform.upload(image, memory.bytes), platform, device)
            return nbytes / min(copy(1) for _ in range(LINK_ROUNDS))
        finally:
            platform.synchronize(device)
            locks.release()
    finally:
        memory.close()


class OpTimeCache:
    """A small JSON file: seconds by operation, by device and release of torch."""

    def __init__(self, path: Path, label: str) -> None:
        import torch

        self._path = path
        self._owner = f"{label}, torch {torch.__version__}"

    def read(self) -> dict[str, float]:
        """Empty where there is no file, or none that can be read, which is logged."""
        found = self._all().get(self._owner, {})
        if not isinstance(found, dict):
            logger.warning("%s is left aside: it is of something else", self._path)
            return {}
        return {key: float(value) for key, value in found.items() if _is_time(value)}

    def write(self, seconds: Mapping[str, float]) -> None:
        """A file that cannot be written is logged; what was measured holds all the same."""
        data = {**self._all(), self._owner: dict(seconds)}
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(data), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            logger.warning("measured times are not kept: %s", error)

    def _all(self) -> dict[str, Any]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is left aside: %s", self._path, error)
            return {}
        return data if isinstance(data, dict) else {}


def op_times_path(setting: str | None = None) -> Path:
    """Beside the cache of weights. `setting` is a stage's `weight_cache_dir`."""
    from omnistage.memory.cache.location import weight_cache_folder

    return weight_cache_folder(setting).parent / "op_times.json"


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _try(op: OpSignature, platform: Platform, device: str) -> float | None:
    import torch

    try:
        with torch.inference_mode():
            once = _timed(op.repeat(device), platform, device)
            once(1)
            started = time.perf_counter()
            first_s = max(once(1), time.perf_counter() - started)
            count = int(min(MAX_REPEATS, max(1, REPEAT_S / max(first_s, 1e-7))))
            return once(count)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        logger.debug("%s cannot be timed: %s", op.name, error)
        return None


def _timed(work: Callable[[], Any], platform: Platform, device: str) -> Callable[[int], float]:
    begin, end = (platform.event(device, timing=True) for _ in range(2))

    def run(count: int) -> float:
        """Seconds of one call, of `count`."""
        stream = platform.current_stream(device)
        begin.record(stream)
        for _ in range(count):
            work()
        end.record(stream)
        end.synchronize()
        return max(begin.elapsed_time(end), 1e-6) / 1000 / count

    return run
