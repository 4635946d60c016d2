"""Ranks in processes of their own, each with a late device, that talk over gloo."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from omnistage.config.resolved import ParallelConfig
from omnistage.memory.host.mapping import AnonymousMemory
from omnistage.parallel.groups import ProcessGroups, open_process_groups
from omnistage.parallel.rendezvous import Rendezvous
from omnistage.parallel.topology import Topology
from omnistage.platforms.registry import platform_of
from tests.memory.offload.fake_device import late_device

LIMIT_S = 60.0
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.memory.offload.models", "diffusers.models.transformers"])


@dataclass
class Rank:
    """What the work of a rank gets."""

    groups: ProcessGroups
    platform: Any

    @property
    def number(self) -> int:
        return self.groups.rank


def on_ranks(
    work: Callable[..., Any],
    *arguments: Any,
    parallel: ParallelConfig | None = None,
    deadline_s: float = 30.0,
    only: Sequence[int] | None = None,
    device: str = "cpu",
) -> list[Any]:
    """Results of `work(rank, *arguments)` of each rank, or of those in `only`; where it raised, the
    exception by type, text and detail; None where its process ended. A rank that is still at work
    after `LIMIT_S` is ended and fails the test. On "cuda", each has a GPU of its own."""
    topology = Topology.of(parallel or ParallelConfig(data_parallel_size=2))
    rendezvous = Rendezvous(LIMIT_S)
    processes, ends = [], []
    try:
        for number in range(topology.world_size):
            ours, theirs = _context.Pipe()
            settings = (topology, number, rendezvous.address, deadline_s, device)
            process = _context.Process(
                target=_rank, args=(theirs, settings, work, arguments), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(ours)
        return [_received(ends[number]) for number in only or range(len(ends))]
    finally:
        for process in processes:
            process.kill()
            process.join(LIMIT_S)
        rendezvous.close()


@contextmanager
def counted_memory() -> Iterator[list[int]]:
    """Sizes of the private regions of host memory that are made meanwhile."""
    sizes: list[int] = []
    make = AnonymousMemory.__init__

    def counted(self: Any, nbytes: int) -> None:
        sizes.append(nbytes)
        make(self, nbytes)

    with patch.object(AnonymousMemory, "__init__", counted):
        yield sizes


def _received(end: Connection) -> Any:
    assert end.poll(LIMIT_S), "a rank hangs"
    try:
        result = end.recv()
    except EOFError:
        return None
    return result


def _rank(end: Connection, settings: Any, work: Callable[..., Any], arguments: Any) -> None:
    with _joined(*settings) as rank:
        try:
            result = work(rank, *arguments)
        except Exception as error:
            traceback.print_exc()
            result = (type(error).__name__, str(error), getattr(error, "detail", None))
        end.send(result)


@contextmanager
def _joined(
    topology: Topology, number: int, address: str, deadline_s: float, device: str
) -> Iterator[Rank]:
    name = device if device == "cpu" else f"{device}:{number}"
    groups = open_process_groups(
        topology, number, device=name, rendezvous=address, timeout_s=deadline_s
    )
    with late_device() if name == "cpu" else nullcontext(platform_of(name)) as platform:
        yield Rank(groups, platform)
    groups.close()
