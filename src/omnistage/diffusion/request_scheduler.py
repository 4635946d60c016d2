"""Request mode: one whole pipeline call per command, for one request or for several that fit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from omnistage.contracts.errors import (
    OmniError,
    OutOfMemoryError,
    RequestCancelledError,
    StageLostError,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest
from omnistage.diffusion.batch_limits import BatchLimits
from omnistage.diffusion.batching import Unshared, pack, unpack
from omnistage.diffusion.queue import QueuedRequest, WaitingQueue

GENERATE = "generate"


@dataclass(slots=True)
class RequestScheduler:
    """Runs the best of those that wait, together with all that share its `batch_key`, at most
    `max_num_seqs`: who is best never waits behind another, so nobody starves.

    Before it starts, a batch that is not full waits up to `max_wait_s` from the arrival of its
    first member for more to come, unless nobody could join it. A batch that fails is split and
    tried again, down to single requests: a fault or a shortage of memory ends only those that
    cannot run alone. After a shortage, batches with that key stay below while any is here.
    """

    queue: WaitingQueue
    max_num_seqs: int = 1
    max_wait_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _running: dict[RequestKey, QueuedRequest] = field(default_factory=dict)
    _split: deque[list[QueuedRequest]] = field(default_factory=deque)
    _limits: BatchLimits = field(init=False)

    def __post_init__(self) -> None:
        self._limits = BatchLimits(self.max_num_seqs)

    def add(self, request: StageRequest) -> None:
        """See `WaitingQueue.add`."""
        key = request.identity.key
        split = any(one.key == key for batch in self._split for one in batch)
        self.queue.add(request, is_here=key in self._running or split)

    def append_input(self, identity: RequestIdentity, data: StageData, epoch: int) -> None:
        self.queue.append_input(identity, data, epoch)

    def end_input(self, identity: RequestIdentity, epoch: int) -> None:
        self.queue.end_input(identity, epoch)

    def set_credits(self, key: RequestKey, credits: int) -> None:
        self.queue.set_credits(key, credits)

    def abort(self, key: RequestKey) -> None:
        self.queue.remove(key)
        self._running.pop(key, None)
        for batch in self._split:
            batch[:] = [one for one in batch if one.key != key]

    def next_command(self) -> Command | None:
        if self._running:
            return None
        batch = self._next_split() or self._next_batch()
        if not batch:
            return None
        self._running = {one.key: one for one in batch}
        return Command(
            name=GENERATE,
            identities=tuple(one.identity for one in batch),
            data=pack([one.payload() for one in batch]),
        )

    def next_wake_s(self) -> float | None:
        """Seconds until a batch that waits for more members starts without them."""
        ready = [] if self._running else self.queue.ready()
        return self._wait_left_s(ready) if ready else None

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        emissions = []
        for identity, outcome in zip(command.identities, unpack(results[0]), strict=True):
            if self._running.pop(identity.key, None) is None:
                continue
            if isinstance(outcome, OmniError):
                emissions.append(Emission(identity=identity, error=outcome, final=True))
            else:
                emissions.append(final_emission(identity, outcome))
        return emissions

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        """A batch is split in two and tried again. Alone, a child that is still here ends."""
        held = [one for one in command.identities if one.key in self._running]
        batch = [self._running.pop(one.key) for one in held]
        size = len(command.identities)
        if size > 1 and is_retried(error):
            if isinstance(error, OutOfMemoryError) and batch:
                self._limits.did_not_fit(GENERATE, batch[0].batch_key, size)
            half = (len(batch) + 1) // 2
            self._split.extendleft(part for part in (batch[half:], batch[:half]) if part)
            return ()
        return tuple(Emission(identity=one, error=error, final=True) for one in held)

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        raise AssertionError("request mode finishes nothing later")

    def counts(self) -> tuple[int, int]:
        return (len(self._running), len(self.queue) + sum(len(batch) for batch in self._split))

    def _next_split(self) -> list[QueuedRequest]:
        """The rest of a batch that failed, in order; no more at a time than fit."""
        while self._split:
            if batch := self._split.popleft():
                most = self._limits.of(GENERATE, batch[0].batch_key)
                if batch[most:]:
                    self._split.appendleft(batch[most:])
                return batch[:most]
        return []

    def _next_batch(self) -> list[QueuedRequest]:
        ready = self.queue.ready()
        self._limits.keep(one.batch_key for one in ready)
        if not ready or self._wait_left_s(ready) > 0:
            return []
        return self.queue.take(self._batch(ready))

    def _batch(self, ready: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        key = ready[0].batch_key
        return [one for one in ready if one.batch_key == key][: self._limits.of(GENERATE, key)]

    def _wait_left_s(self, ready: Sequence[QueuedRequest]) -> float:
        batch = self._batch(ready)
        key = batch[0].batch_key
        if len(batch) >= self._limits.of(GENERATE, key) or isinstance(key, Unshared):
            return 0.0
        return max(0.0, min(one.arrived_s for one in batch) + self.max_wait_s - self.clock())


def final_emission(identity: RequestIdentity, data: StageData) -> Emission:
    timings_s = data.fields.pop("timings_s", {})
    return Emission(
        identity=identity, data=data, final=True, finish_reason="stop", timings_s=timings_s
    )


def is_retried(error: OmniError) -> bool:
    """Whether the members of a failed batch get another chance apart."""
    return not isinstance(error, StageLostError | RequestCancelledError)
