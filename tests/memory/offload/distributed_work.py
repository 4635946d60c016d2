"""What one rank does in the tests of distributed offload. Results are plain values."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from omnistage.memory.offload.factory import make_backend
from tests.memory.offload.models import Pipeline, built, placed, run
from tests.memory.offload.ranks import Rank


@contextmanager
def shared(
    rank: Rank, module: Any, residents: tuple[int, ...] = (), **settings: Any
) -> Iterator[Any]:
    use_allgather = settings.pop("use_allgather", True)
    host_weights = settings.pop("host_weights", {})
    placement = replace(placed(module, residents, **settings), strategy="distributed-layerwise")
    backend = make_backend(
        placement, host_weights, rank.platform, "cpu", rank.groups, use_allgather=use_allgather
    )
    backend.enable(Pipeline(transformer=module))
    try:
        yield backend
    finally:
        backend.disable()


def passes(rank: Rank, name: str, residents: tuple[int, ...], settings: dict[str, Any]) -> Any:
    """(whether three results equal those without offload, description, bytes locked meanwhile and
    after, copies that overtook compute)."""
    module = built(name)
    expected = run(module, name)
    with shared(rank, module, residents, **settings) as backend:
        locked_bytes = rank.platform.locked_bytes
        with rank.platform.watching_reads():
            equal = [torch.equal(run(module, name), expected) for _ in range(3)]
        described = backend.describe()
    return equal, described, (locked_bytes, rank.platform.locked_bytes), rank.platform.overtaken
