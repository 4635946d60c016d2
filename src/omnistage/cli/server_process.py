"""A server of one's own for the time of a `with` block: started, awaited, and always ended."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omnistage.contracts.errors import DeadlineExceededError

READY = "ready: "
STOP_DEADLINE_S = 30.0


class ServerEnded(Exception):
    """The server ended before it was ready. It has said why on standard error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the server ended with exit code {exit_code} before it was ready")
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    url: str
    pid: int
    start_s: float


@contextlib.contextmanager
def running_server(
    model: str, flags: Sequence[str] = (), *, start_deadline_s: float = 600.0
) -> Iterator[RunningServer]:
    """Serve `model` on a free port of the loopback interface; `flags` are those of `serve`.

    The child ends with its standard input, so that it cannot outlive this process however that
    ends. Raises `ServerEnded`, and `DeadlineExceededError` when it is not ready in time.
    """
    command = [sys.executable, "-m", "omnistage", "serve", model]
    command += ["--host", "127.0.0.1", "--port", "0", "--stop-with-stdin", *flags]
    started = time.monotonic()
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = _await_ready(child, start_deadline_s)
        yield RunningServer(url=url, pid=child.pid, start_s=time.monotonic() - started)
    finally:
        _stop(child)


def _await_ready(child: subprocess.Popen[str], deadline_s: float) -> str:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="server-output", daemon=True).start()
    end = time.monotonic() + deadline_s
    while True:
        try:
            line = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise DeadlineExceededError(
                f"the server was not ready within {deadline_s:g} s"
            ) from None
        if line is None:
            raise ServerEnded(child.wait(STOP_DEADLINE_S))
        if line.startswith(READY):
            return line.rsplit(" at ", 1)[1].strip()


def _stop(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    try:
        child.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(STOP_DEADLINE_S)
