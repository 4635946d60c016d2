"""Calls to a replica: what it holds, profiles; else its scheduler's, else its executor's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.runtime import Command, Executor, HasControls, Scheduler
from omnistage.observability.profiling import MAX_S, MAX_STEPS, Profiler

HELD_RESOURCES = "held_resources"
START_PROFILE = "start_profile"
STOP_PROFILE = "stop_profile"


class ReplicaControls:
    """Used by the replica's executing thread only, since a profiler belongs to one thread."""

    def __init__(
        self,
        stage_name: str,
        replica_id: int,
        executor: Executor,
        scheduler: Scheduler,
        held_resources: Callable[[], dict[str, int]],
        finish_outputs: Callable[[], None],
    ) -> None:
        self._stage_name = stage_name
        self._replica_id = replica_id
        self._executor = executor
        self._scheduler_calls = scheduler.controls() if isinstance(scheduler, HasControls) else {}
        self._held_resources = held_resources
        self._finish_outputs = finish_outputs
        self._profiler: Profiler | None = None

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """The answer, as plain values. Raises whatever the call raises."""
        if method == HELD_RESOURCES:
            return self._held_resources()
        if method == START_PROFILE:
            return self._start_profile(**arguments)
        if method == STOP_PROFILE:
            return self._stop_profile()
        if method in self._scheduler_calls:
            return self._scheduler_calls[method](**arguments)
        self._finish_outputs()
        return self._executor.control(method, arguments)

    def profiled(self, command: Command) -> AbstractContextManager[Any]:
        """Names the command in the trace that is being recorded, if one is."""
        if self._profiler is None:
            return nullcontext()
        ids = tuple(str(identity) for identity in command.identities)
        return self._profiler.region(command.name, ids)

    def command_done(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()

    def _start_profile(
        self, directory: str, max_steps: int = MAX_STEPS, max_s: float = MAX_S
    ) -> None:
        if self._profiler is not None and self._profiler.running:
            raise InvalidRequestError("profiling is running already; stop it first")
        profiler = Profiler(Path(directory), stage=self._stage_name, replica=self._replica_id)
        profiler.start(max_steps=max_steps, max_s=max_s)
        self._profiler = profiler

    def _stop_profile(self) -> list[str]:
        """The files written since the start; a bound may have ended the recording before."""
        if self._profiler is None:
            raise InvalidRequestError("profiling is not running; start it first")
        profiler, self._profiler = self._profiler, None
        if profiler.running:
            profiler.stop()
        return [str(path) for path in profiler.traces]
