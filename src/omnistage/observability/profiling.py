"""Opt-in traces by torch's profiler, of one rank, bounded in steps and time.

The profiler belongs to the thread that executes: only it may call `start`, `step`, `region` and
`stop`.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from omnistage.contracts.errors import InvalidRequestError

MAX_STEPS = 100
MAX_S = 60.0


class Profiler:
    """Traces of one rank of one replica, written to `directory` in Chrome's trace format, named
    `<stage>-replica<n>-rank<n>-<pid>-<number>.json.gz`. Costs nothing until started."""

    def __init__(self, directory: Path, *, stage: str, replica: int, rank: int = 0) -> None:
        self._directory = directory
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", stage)
        self._labels: dict[str, str | int] = {"stage": plain, "replica": replica, "rank": rank}
        self._profile: Any = None
        self._steps_left = 0
        self._ends_at_s = 0.0
        self._written: list[Path] = []

    @property
    def running(self) -> bool:
        return self._profile is not None

    @property
    def traces(self) -> tuple[Path, ...]:
        """Files written so far, the oldest first."""
        return tuple(self._written)

    def start(self, *, max_steps: int = MAX_STEPS, max_s: float = MAX_S) -> None:
        """Record until `stop`, or until `step` has been called `max_steps` times or `max_s` are
        over. Raises `InvalidRequestError` when running already, for bounds that are not positive,
        and when the directory cannot be written."""
        if self.running:
            raise InvalidRequestError("profiling is running already; stop it first")
        if max_steps < 1 or max_s <= 0:
            raise InvalidRequestError(
                f"a profile of {max_steps} steps and {max_s} s; both must be positive"
            )
        self._prepare_directory()
        from torch.profiler import profile

        recording = profile(acc_events=False, record_shapes=False, with_stack=False)
        recording.start()
        for name, value in self._labels.items():
            recording.add_metadata_json(name, json.dumps(value))
        self._profile = recording
        self._steps_left, self._ends_at_s = max_steps, time.monotonic() + max_s

    def step(self) -> None:
        """One unit of work is done; ends the recording when a bound is reached."""
        if self._profile is None:
            return
        self._steps_left -= 1
        if self._steps_left <= 0 or time.monotonic() >= self._ends_at_s:
            self.stop()

    def region(
        self, operation: str, request_ids: tuple[str, ...] = ()
    ) -> AbstractContextManager[Any]:
        """Names what runs inside in the trace: an operation and ids, never their content."""
        if self._profile is None:
            return nullcontext()
        from torch.profiler import record_function

        scope: AbstractContextManager[Any] = record_function(" ".join((operation, *request_ids)))
        return scope

    def stop(self) -> Path:
        """End the recording and return its file, which appears complete or not at all.

        Raises `InvalidRequestError` when nothing was started.
        """
        if self._profile is None:
            raise InvalidRequestError("profiling is not running; start it first")
        recording, self._profile = self._profile, None
        recording.stop()
        path = self._directory / self._file_name()
        partial = path.with_name(f"partial-{os.getpid()}-{path.name}")
        try:
            recording.export_chrome_trace(str(partial))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        self._written.append(path)
        return path

    def close(self) -> None:
        """Drop a recording that is running. Idempotent."""
        recording, self._profile = self._profile, None
        if recording is not None:
            recording.stop()

    def _prepare_directory(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(
                f"the profile directory {self._directory} cannot be made: {error.strerror}"
            ) from error
        if not os.access(self._directory, os.W_OK):
            raise InvalidRequestError(f"the profile directory {self._directory} is not writable")

    def _file_name(self) -> str:
        stage, replica, rank = self._labels.values()
        process = f"{os.getpid()}-{len(self._written)}"
        return f"{stage}-replica{replica}-rank{rank}-{process}.json.gz"
