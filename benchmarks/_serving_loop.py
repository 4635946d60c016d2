"""Drives a scheduler and a runner in one thread as a replica does: mail, one command, emissions.

Late outputs are finished on a thread of their own, as a replica's are.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from omnistage.contracts.errors import OmniError, as_omni_error
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, StageRequest
from omnistage.contracts.sampling import OmniDiffusionSamplingParams

STALL_S = 120.0


def request(call: dict[str, Any], request_id: str, **params: Any) -> StageRequest:
    """A call of diffusers' pipeline as a request of ours."""
    given = dict(call)
    texts = {name: given.pop(name, None) for name in ("prompt", "negative_prompt")}
    return StageRequest(
        identity=RequestIdentity(request_id=request_id),
        data=StageData(modality=Modality.TEXT, fields=texts),
        params=OmniDiffusionSamplingParams(**given, seed=0, **params),
    )


class Loop:
    """`latencies_s` holds seconds from `submit` (or the time given to it) to the final output.

    `ours` has a new `scheduler`, a `runner` and `release`. `on_command` is called after each
    command. An error of a request is raised.
    """

    rank, world_size = 0, 1

    def __init__(self, ours: Any) -> None:
        self._ours = ours
        self._scheduler = ours.new_scheduler()
        self._late: queue.SimpleQueue[tuple[RequestIdentity, Any]] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outputs")
        self._arrived_s: dict[RequestKey, float] = {}
        self.latencies_s: dict[RequestKey, float] = {}
        self.steps_done = 0
        self.on_command: Callable[[Command], None] = lambda command: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing of an unfinished request stays."""
        for key in list(self._arrived_s):
            self.abort(key)
        self._thread.shutdown(wait=True)

    # what a client does ------------------------------------------------------------------------

    def submit(self, one: StageRequest, arrived_s: float | None = None) -> None:
        self._arrived_s[one.identity.key] = time.perf_counter() if arrived_s is None else arrived_s
        self._scheduler.add(one)

    def abort(self, key: RequestKey) -> None:
        self._scheduler.abort(key)
        self._ours.release(key)
        self._arrived_s.pop(key, None)

    @property
    def num_open(self) -> int:
        return len(self._arrived_s)

    # the loop ----------------------------------------------------------------------------------

    def run_until_idle(self) -> None:
        while self.num_open:
            if not self.turn():
                self.wait(STALL_S)

    def turn(self) -> bool:
        """Outputs that are there, and one command; False when there was neither."""
        taken = self._take_late(block_s=None)
        command = self._scheduler.next_command()
        if command is None:
            return taken
        try:
            result = self._ours.runner.execute(command, self)
        except OmniError as error:
            self._emit(self._scheduler.fail(command, error))
            return True
        self.steps_done += command.name == "step"
        self._emit(self._scheduler.complete(command, [result]))
        self.on_command(command)
        return True

    def wait(self, limit_s: float) -> None:
        """Until a late output is there, at most `limit_s`."""
        if not self._take_late(block_s=limit_s) and limit_s >= STALL_S:
            raise AssertionError(f"nothing happened for {limit_s:g} s; {self.num_open} are open")

    def _take_late(self, block_s: float | None) -> bool:
        taken = False
        try:
            while True:
                wait = block_s is not None and not taken
                identity, outcome = self._late.get(block=wait, timeout=block_s if wait else None)
                taken = True
                self._emit(self._scheduler.deliver(identity, outcome))
        except queue.Empty:
            return taken

    def _emit(self, emissions: Any) -> None:
        for emission in emissions:
            if emission.error is not None:
                raise emission.error
            if emission.final:
                key = emission.identity.key
                self.latencies_s[key] = time.perf_counter() - self._arrived_s.pop(key)
                self._ours.release(key)

    # the context of a command -------------------------------------------------------------------

    def checkpoint(self) -> frozenset[RequestKey]:
        return frozenset()

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        """Nobody listens."""

    def operation(self, kind: str) -> None:
        """No clock runs."""

    def finish_later(self, identity: RequestIdentity, work: Callable[[], StageData]) -> None:
        def finish() -> None:
            try:
                outcome: Any = work()
            except Exception as error:
                outcome = as_omni_error(error)
            self._late.put((identity, outcome))

        self._thread.submit(finish)
