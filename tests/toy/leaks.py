"""What a run must not leave behind: processes, descriptors, sockets, segments, threads, tasks."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from omnistage.engine.async_omni import AsyncOmni

PATIENCE_S = 10.0


def _process_ids() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _descriptors() -> set[str]:
    """What the open descriptors point to; those that vanish while listed do not count."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


def _sockets() -> set[str]:
    """Our named sockets. They have no file, so they live exactly as long as a descriptor."""
    inodes = {entry.split("[")[1][:-1] for entry in _descriptors() if "socket:[" in entry}
    lines = Path("/proc/net/unix").read_text().splitlines()
    named = [line.split() for line in lines if "@omnistage-" in line]
    return {columns[-1] for columns in named if columns[6] in inodes}


def _segments() -> set[str]:
    return {entry for entry in _descriptors() if "memfd:" in entry}


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


PROBES: dict[str, Callable[[], set]] = {
    "processes": _process_ids,
    "sockets": _sockets,
    "descriptors": _descriptors,
    "segments": _segments,
    "threads": _threads,
}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails when the block leaves anything behind that was not there before."""
    before = {name: probe() for name, probe in PROBES.items()}
    yield
    give_up = time.monotonic() + PATIENCE_S
    while True:
        gc.collect()
        left = {name: probe() - before[name] for name, probe in PROBES.items()}
        left = {name: what for name, what in left.items() if what}
        if not left:
            return
        assert time.monotonic() < give_up, f"left behind: {left}"
        time.sleep(0.02)


async def assert_idle(engine: AsyncOmni) -> None:
    """Fails unless no request is held anywhere: engine, schedulers, executors, shared memory."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        held = {"requests": engine.num_requests}
        held["engine payloads"] = engine._running().entry.outstanding()
        for i, report in enumerate(await engine.collective_rpc("held_resources")):
            held |= {f"replica {i}: {name}": count for name, count in report.items()}
        for i, count in enumerate(await engine.collective_rpc("executor_holds")):
            held[f"executor {i}"] = count
        held = {name: count for name, count in held.items() if count}
        if not held:
            return
        assert time.monotonic() < give_up, f"still held: {held}"
        await asyncio.sleep(0.01)


async def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {PATIENCE_S} s for {what}"
        await asyncio.sleep(0.005)


async def assert_no_tasks(before: set[asyncio.Task]) -> None:
    """Fails when the engine has left a task on this loop that was not there `before`."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        gone = before | {asyncio.current_task()}
        left = [task.get_name() for task in asyncio.all_tasks() - gone]
        if not left:
            return
        assert time.monotonic() < give_up, f"tasks left: {left}"
        await asyncio.sleep(0.01)
