"""The real command in a process of its own, watched for what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

DEADLINE_S = 120.0
GONE_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    left_behind: tuple[str, ...]


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stderr: int | IO[str] = subprocess.PIPE,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[str]:
    """`omnistage ARGUMENTS` as the leader of a session, so that all its children can be found."""
    return subprocess.Popen(
        [sys.executable, "-m", "omnistage", *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )


def finish(child: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Ended:
    """Wait for the end; kill the whole session when the deadline passes."""
    try:
        out, err = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        raise AssertionError(f"still running after {deadline_s} s:\n{out}\n{err}") from None
    return Ended(child.returncode, out, err or "", survivors(child.pid))


def run(arguments: Sequence[str], **options: object) -> Ended:
    return finish(start(arguments, **options))  # type: ignore[arg-type]


def survivors(session: int) -> tuple[str, ...]:
    """Commands that still run in the session after a moment's grace."""
    end = time.monotonic() + GONE_DEADLINE_S
    while True:
        alive = tuple(_members(session))
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.05)


def _members(session: int) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == session:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


def the_error(ended: Ended) -> str:
    """The one line of a refusal; fails when it is not alone, not last, or has a traceback."""
    lines = ended.err.splitlines()
    errors = [line for line in lines if line.startswith("omnistage: error: ")]
    assert len(errors) == 1, ended.err
    assert lines[-1] == errors[0], ended.err
    assert "Traceback" not in ended.err, ended.err
    assert ended.left_behind == ()
    return errors[0].removeprefix("omnistage: error: ")
