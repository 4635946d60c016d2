"""Request mode: one whole pipeline call per command, for one request or for several that fit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
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
from omnistage.diffusion.wave_data import failure_of_share, pack_wave
from omnistage.diffusion.waves import WaveRules, plan_shares

GENERATE = "generate"


@dataclass(slots=True)
class RequestScheduler:
    """Runs the best of those that wait, together with all that share its `batch_key`, at most
    `max_num_seqs`: who is best never waits behind another, so nobody starves. Where `rules` has
    several shares, each rank runs such a batch: a wave, which ends with the slowest.

    Before it starts, a batch that is not full waits up to `max_wait_s` from the arrival of its
    first member for more to come, unless nobody could join it. A batch that fails is split and
    tried again, down to single requests: a fault or a shortage of memory ends only those that
    cannot run alone. After a shortage, batches with that key stay below while any is here.
    """

    queue: WaitingQueue
    max_num_seqs: int = 1
    max_wait_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    rules: WaveRules = field(default_factory=WaveRules)
    _shares: list[list[QueuedRequest]] = field(default_factory=list)
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
        self._shares = self._next_split() or self._next_wave()
        if not self._shares:
            return None
        members = [one for share in self._shares for one in share]
        self._running = {one.key: one for one in members}
        data = pack([one.payload() for one in members])
        alone = self.rules == WaveRules()
        return Command(
            name=GENERATE,
            identities=tuple(one.identity for one in members),
            data=data if alone else pack_wave(data, [len(share) for share in self._shares]),
            lockstep=alone,
        )

    def next_wake_s(self) -> float | None:
        """Seconds until a batch that waits for more members starts without them."""
        ready = [] if self._running else self.queue.ready()
        return self._wait_left_s(ready) if ready else None

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        emissions: list[Emission] = []
        for share, leader in zip(self._shares, self.rules.leaders, strict=False):
            failure = failure_of_share(results[leader])
            if failure is None:
                emissions += self._complete_share(share, results[leader])
            else:
                emissions += self._fail_shares([share], failure)
        return emissions

    def _complete_share(
        self, share: Sequence[QueuedRequest], result: StageData
    ) -> Iterable[Emission]:
        emissions = []
        for one, outcome in zip(share, unpack(result), strict=True):
            identity = one.identity
            if self._running.pop(identity.key, None) is None:
                continue
            if isinstance(outcome, OmniError):
                emissions.append(Emission(identity=identity, error=outcome, final=True))
            else:
                emissions.append(final_emission(identity, outcome))
        return emissions

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        """A wave is tried again share by share, a batch split in two. Alone, a child that is still
        here ends."""
        return self._fail_shares(self._shares, error)

    def _fail_shares(
        self, shares: Sequence[Sequence[QueuedRequest]], error: OmniError
    ) -> Iterable[Emission]:
        held = [
            [one for one in share if self._running.pop(one.key, None) is not None]
            for share in shares
        ]
        size = max(map(len, shares))
        if not is_retried(error) or (size == 1 and len(shares) == 1):
            return [
                Emission(identity=one.identity, error=error, final=True)
                for share in held
                for one in share
            ]
        if isinstance(error, OutOfMemoryError) and size > 1:
            for share in shares:
                self._limits.did_not_fit(GENERATE, share[0].batch_key, size)
        for share in reversed(held):
            half = len(share) if len(shares) > 1 else (len(share) + 1) // 2
            self._split.extendleft(part for part in (share[half:], share[:half]) if part)
        return ()

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        raise AssertionError("request mode finishes nothing later")

    def counts(self) -> tuple[int, int]:
        return (len(self._running), len(self.queue) + sum(len(batch) for batch in self._split))

    def _next_split(self) -> list[list[QueuedRequest]]:
        """One share: the rest of a batch that failed, in order; no more at a time than fit."""
        while self._split:
            if batch := self._split.popleft():
                most = self._limits.of(GENERATE, batch[0].batch_key)
                if batch[most:]:
                    self._split.appendleft(batch[most:])
                return [batch[:most]]
        return []

    def _next_wave(self) -> list[list[QueuedRequest]]:
        ready = self.queue.ready()
        self._limits.keep(one.batch_key for one in ready)
        if not ready or self._wait_left_s(ready) > 0:
            return []
        shares = plan_shares(ready, self._most_of, self.rules)
        self.queue.take([one for share in shares for one in share])
        return shares

    def _most_of(self, key: Hashable) -> int:
        return self._limits.of(GENERATE, key)

    def _wait_left_s(self, ready: Sequence[QueuedRequest]) -> float:
        """A wave of several shares is full when no rank could take more."""
        shares = plan_shares(ready, self._most_of, self.rules)
        batch = [one for share in shares for one in share]
        full = len(shares) == self.rules.num_shares and all(
            isinstance(share[0].batch_key, Unshared)
            or len(share) >= self._most_of(share[0].batch_key)
            for share in shares
        )
        nobody_could_join = self.rules.num_shares == 1 or self.rules.synchronized
        if full or (nobody_could_join and isinstance(batch[0].batch_key, Unshared)):
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
