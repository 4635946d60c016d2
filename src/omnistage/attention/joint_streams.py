"""Independent pieces of work of one operator on two CUDA streams, so that their waves overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Job(NamedTuple):
    """`cost` in any unit that the jobs of one call share."""

    cost: int
    work: Callable[[], None]


_OF_THREAD = threading.local()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device and thread: a thread that captures a graph must share it with no other."""
    streams: dict[torch.device, torch.cuda.Stream] = _OF_THREAD.__dict__
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def split_by_cost(jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """Two shares of about equal cost: the dearest first, each to the cheaper share."""
    shares: tuple[list[Job], list[Job]] = ([], [])
    totals = [0, 0]
    for job in sorted(jobs, key=lambda each: -each.cost):
        cheaper = totals.index(min(totals))
        shares[cheaper].append(job)
        totals[cheaper] += job.cost
    return shares


def run_jobs(jobs: Sequence[Job], device: torch.device) -> None:
    """Enqueue all; later work of the current stream sees their results.

    The jobs' inputs and outputs must be allocated before the call and outlive it: the side stream
    starts after what the current stream holds by now, and the current stream waits for it before
    anything later, so the allocator cannot hand their memory to work that runs too early. What a
    job allocates belongs to its own stream. Legal while a CUDA graph is captured.
    """
    if device.type != "cuda":
        for job in jobs:
            job.work()
        return
    here, there = split_by_cost(jobs)
    with torch.cuda.device(device):
        current = torch.cuda.current_stream(device)
        side = _side_stream(device) if there else None
        if side is not None:
            side.wait_stream(current)
        try:
            for stream, share in ((side, there), (current, here)):
                _enqueue(share, stream)
        finally:
            if side is not None:
                current.wait_stream(side)


def _enqueue(jobs: Sequence[Job], stream: torch.cuda.Stream | None) -> None:
    with torch.cuda.stream(stream):
        for job in jobs:
            job.work()
