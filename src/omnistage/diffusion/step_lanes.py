"""Step mode on several ranks: a lane of requests for each that shares no requests with others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from omnistage.contracts.errors import OmniError, OutOfMemoryError, StageLostError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest
from omnistage.diffusion.active import DECODE, ENCODE, KINDS, PREVIEW, STEP
from omnistage.diffusion.batching import unpack
from omnistage.diffusion.queue import WaitingQueue
from omnistage.diffusion.step_scheduler import StepScheduler
from omnistage.diffusion.wave_step_data import StepShare, any_aborted, pack_shares

_ORDER = (DECODE, PREVIEW, ENCODE, STEP)
Outcome = StageData | OmniError


@dataclass(slots=True)
class LaneScheduler:
    """`ranks[i]` serve the requests of `lanes[i]`, the first of them makes their outputs. A request
    is admitted to the lane with the least to do and stays there.

    A command holds a share for each lane that has something to do, whatever that is. With
    `one_kind` all do the same: steps are made by all ranks together, and every rank encodes all
    requests. A share that fails is its lane's alone; one that was `aborted` is tried again.
    """

    queue: WaitingQueue
    lanes: Sequence[StepScheduler]
    ranks: Sequence[Sequence[int]]
    one_kind: bool
    limits_s: Mapping[str, float]
    _shares: list[StepShare] = field(default_factory=list)

    def add(self, request: StageRequest) -> None:
        """See `WaitingQueue.add`."""
        key = request.identity.key
        self.queue.add(request, is_here=any(lane.holds(key) for lane in self.lanes))

    def append_input(self, identity: RequestIdentity, data: StageData, epoch: int) -> None:
        self.queue.append_input(identity, data, epoch)

    def end_input(self, identity: RequestIdentity, epoch: int) -> None:
        self.queue.end_input(identity, epoch)

    def set_credits(self, key: RequestKey, credits: int) -> None:
        for lane in self.lanes:
            lane.set_credits(key, credits)

    def abort(self, key: RequestKey) -> None:
        for lane in self.lanes:
            lane.abort(key)

    def counts(self) -> tuple[int, int]:
        return sum(lane.counts()[0] for lane in self.lanes), len(self.queue)

    def next_wake_s(self) -> float | None:
        return None

    def next_command(self) -> Command | None:
        for lane in self.lanes:
            lane.keep_limits()
        self._admit()
        choices = {place: lane.choice() for place, lane in enumerate(self.lanes)}
        due = {place: choice for place, choice in choices.items() if choice is not None}
        if not due:
            return None
        if self.one_kind:
            first = min((name for name, _ in due.values()), key=_ORDER.index)
            due = {place: choice for place, choice in due.items() if choice[0] == first}
        self._shares = [
            StepShare(place=place, command=self.lanes[place].begin(*choice))
            for place, choice in due.items()
        ]
        kinds = [KINDS[name] for name, _ in due.values()]
        return pack_shares(self._shares, max(kinds, key=self._limit_s))

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        """Raises `StageLostError` when the ranks of a lane do not agree on how far they are."""
        by_rank = [unpack(result) for result in results]
        emissions: list[Emission] = []
        for index, share in enumerate(self._shares):
            lane = self.lanes[share.place]
            outcomes = [of_shares[index] for of_shares in by_rank]
            own = [outcomes[rank] for rank in self.ranks[share.place]]
            failure = _failure_of(own[:1] if share.command.name in (DECODE, PREVIEW) else outcomes)
            done = [one for one in own if isinstance(one, StageData)]
            if share.command.name == STEP:
                _check_together(own, done)
            if failure is not None:
                emissions += lane.fail(share.command, failure)
            elif not any_aborted(done):
                emissions += lane.complete(share.command, done[:1])
        return emissions

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        return [
            emission
            for share in self._shares
            for emission in self.lanes[share.place].fail(share.command, error)
        ]

    def deliver(self, identity: RequestIdentity, outcome: Outcome) -> Iterable[Emission]:
        return [emission for lane in self.lanes for emission in lane.deliver(identity, outcome)]

    def _admit(self) -> None:
        """One by one, each where there is least to do and a place."""
        while any(lane.admit(1) for lane in sorted(self.lanes, key=lambda lane: lane.load)):
            pass

    def _limit_s(self, kind: str) -> float:
        return self.limits_s.get(kind, self.limits_s["forward"])


def _failure_of(outcomes: Iterable[Outcome]) -> OmniError | None:
    """A shortage of memory first: it says most about what to try next."""
    failures = [one for one in outcomes if isinstance(one, OmniError)]
    short = [one for one in failures if isinstance(one, OutOfMemoryError)]
    return next(iter([*short, *failures]), None)


def _check_together(own: Sequence[Outcome], done: Sequence[StageData]) -> None:
    """Of ranks that hold the same requests each must have moved the same ones."""
    steps = [one.fields.get("steps") for one in done]
    all_or_none = len(done) in (0, len(own)) or any_aborted(done)
    if not all_or_none or any(one != steps[0] for one in steps):
        raise StageLostError("the ranks of this stage fell out of step; please retry")
