"""Starting a process of ours and tying its life to the parent's.

A child is a fresh interpreter (`python -m MODULE`). Its launch record comes over its standard
input, which then stays open as a lifeline: when the parent dies, however it dies, the pipe reads
end-of-file and the child ends itself. No name, file or resource tracker is involved, and user
scripts need no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from omnistage.config.resolved import ResolvedStage
from omnistage.observability.logging import LogSettings

LIFELINE_LOST_EXIT_CODE = 71
_CHILD_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
"""Threads that spin for long make a busy CPU ten times slower (measured: 1.6 s became 16 s), those
that never do make a free one slower by 60 %: they sleep and wake between any two operations."""
_MEMORY_DEFAULTS = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Torch's larger tensors on a CPU lie in pages of 2 MiB where Linux gives them to who asks: decode
steps of a 135 M model in bfloat16 take a fifth less of a CPU's time."""
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_RANK_DEFAULTS = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
"""The ranks of a replica are on one host: what they listen on for each other is not for others."""
RANK_LOST_EXIT_CODE = 72
REPLICA_FAILED_EXIT_CODE = 73

_LENGTH = struct.Struct("<Q")


class ReplicaLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica to host: its stage and which copy of it this is."""

    stage: ResolvedStage
    replica_id: int


class ProcessLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replica process is told at its start."""

    endpoint: str
    token: str
    replicas: tuple[ReplicaLaunch, ...]
    sys_path: tuple[str, ...]
    log: LogSettings = LogSettings()
    heartbeat_interval_s: float = 1.0


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank process is told at its start."""

    endpoint: str
    token: str
    stage: ResolvedStage
    replica_id: int
    rank: int
    world_size: int
    sys_path: tuple[str, ...]
    log: LogSettings = LogSettings()


Launch = TypeVar("Launch", ProcessLaunch, RankLaunch)


def child_command(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def encode_launch(launch: ProcessLaunch | RankLaunch) -> bytes:
    body = msgspec.msgpack.encode(launch)
    return _LENGTH.pack(len(body)) + body


def read_launch(kind: type[Launch]) -> Launch:
    """In the child: read the launch record and make the parent's modules importable."""
    stdin = sys.stdin.buffer
    (length,) = _LENGTH.unpack(stdin.read(_LENGTH.size))
    launch = msgspec.msgpack.decode(stdin.read(length), type=kind)
    sys.path[:] = list(launch.sys_path)
    return launch


def end_with_parent(exit_code: int = LIFELINE_LOST_EXIT_CODE) -> None:
    """In the child: watch the lifeline from a daemon thread."""
    descriptor = sys.stdin.fileno()

    def watch() -> None:
        while os.read(descriptor, 64):
            pass
        os._exit(exit_code)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def start_child(
    module: str, launch: ProcessLaunch | RankLaunch, on_exit: Callable[[int], None]
) -> subprocess.Popen[bytes]:
    """Start `python -m module`; `on_exit(code)` is called from a watcher thread when it ends.

    The child gets its own process group: Ctrl-C reaches the parent alone, which then shuts down
    in order. Returns at once; the record is written by the watcher, for a pipe may be full.
    """
    defaults = {} if "OMP_WAIT_POLICY" in os.environ else _CHILD_DEFAULTS
    environment = (
        _MEMORY_DEFAULTS | _RANK_DEFAULTS | defaults | os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    child = subprocess.Popen(
        child_command(module), stdin=subprocess.PIPE, env=environment, bufsize=0, process_group=0
    )
    record = memoryview(encode_launch(launch))

    def watch() -> None:
        assert child.stdin is not None
        rest = record
        with contextlib.suppress(BrokenPipeError):  # It died at once: `wait` says how.
            while rest:
                rest = rest[child.stdin.write(rest) :]
        code = child.wait()
        child.stdin.close()
        on_exit(code)

    threading.Thread(target=watch, name=f"watch-{child.pid}", daemon=True).start()
    return child


def describe_exit(code: int) -> str:
    """`-9` → "killed by SIGKILL"; `72` → what our own exit codes mean."""
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    known = {
        LIFELINE_LOST_EXIT_CODE: "its parent disappeared",
        RANK_LOST_EXIT_CODE: "one of its ranks died",
        REPLICA_FAILED_EXIT_CODE: "its executing thread broke",
    }
    return known.get(code, f"exit code {code}")


def _signal_name(number: int) -> str:
    """Most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
