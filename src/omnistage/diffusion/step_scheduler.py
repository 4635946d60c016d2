"""Step mode: requests join and leave between denoising steps.

A request is encoded, takes its steps in waves with others of its shape, and is decoded. Encoding,
previews and decoding are commands of their own, each for as many requests as are due.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from omnistage.contracts.errors import OmniError, OutOfMemoryError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest
from omnistage.diffusion.batching import pack, unpack
from omnistage.diffusion.queue import QueuedRequest, WaitingQueue
from omnistage.diffusion.request_scheduler import final_emission, is_retried

ENCODE, STEP, PREVIEW, DECODE = "encode", "step", "preview", "decode"
KINDS = {ENCODE: "encode", STEP: "step", PREVIEW: "decode", DECODE: "decode"}
"""Which deadline each command has."""


class Phase(Enum):
    ENCODE = ENCODE
    DENOISE = STEP
    DECODE = DECODE
    DELIVER = "deliver"


@dataclass(slots=True)
class ActiveRequest:
    """A request that has been admitted. `batch_key` and `cost` (tokens that one of its steps
    computes) are the executor's answer to its encoding; `alone` after a batch with it has failed.
    """

    entry: QueuedRequest
    phase: Phase = Phase.ENCODE
    batch_key: Hashable = None
    cost: int = 1
    step: int = 0
    total_steps: int = 0
    previews: list[int] = field(default_factory=list)
    num_previewed: int = 0
    alone: bool = False

    @property
    def key(self) -> RequestKey:
        return self.entry.key

    @property
    def preview_is_due(self) -> bool:
        """A preview never takes the last credit: that one is for the result."""
        credits = self.entry.credits
        has_credit = credits is None or credits > 1
        return bool(self.previews) and self.step >= self.previews[0] and has_credit


@dataclass(slots=True)
class StepScheduler:
    """At most `max_num_seqs` requests denoise at a time, of at most `max_shapes` different shapes.

    Shapes take turns such that their requests get equal shares of the device. When no more shapes
    fit, admission looks past a request of another shape, at most `max_overtakes` times; then it
    waits until that one is in. After a batch ran out of memory, batches of that shape stay below
    its size; after any other failure each of its members runs alone once.
    """

    queue: WaitingQueue
    max_num_seqs: int = 1
    max_shapes: int = 4
    max_overtakes: int = 16
    _active: dict[RequestKey, ActiveRequest] = field(default_factory=dict)
    _spent: dict[Hashable, float] = field(default_factory=dict)
    _limits: dict[tuple[str, Hashable], int] = field(default_factory=dict)

    def add(self, request: StageRequest) -> None:
        """See `WaitingQueue.add`."""
        self.queue.add(request, is_here=request.identity.key in self._active)

    def append_input(self, identity: RequestIdentity, data: StageData, epoch: int) -> None:
        self.queue.append_input(identity, data, epoch)

    def end_input(self, identity: RequestIdentity, epoch: int) -> None:
        self.queue.end_input(identity, epoch)

    def set_credits(self, key: RequestKey, credits: int) -> None:
        if active := self._active.get(key):
            active.entry.credits = credits
        self.queue.set_credits(key, credits)

    def abort(self, key: RequestKey) -> None:
        self.queue.remove(key)
        self._active.pop(key, None)

    def counts(self) -> tuple[int, int]:
        return (len(self._active), len(self.queue))

    def next_wake_s(self) -> float | None:
        return None

    # choosing ---------------------------------------------------------------------------------

    def next_command(self) -> Command | None:
        """What frees or fills places comes first: decode, previews, encode; then a step."""
        self._admit()
        for name, due in (
            (DECODE, [one for one in self._in(Phase.DECODE) if one.entry.credits != 0]),
            (PREVIEW, [one for one in self._in(Phase.DENOISE) if one.preview_is_due]),
            (ENCODE, self._in(Phase.ENCODE)),
            (STEP, self._in(Phase.DENOISE)),
        ):
            if due:
                return self._command(name, self._wave(name, due))
        return None

    def _in(self, phase: Phase) -> list[ActiveRequest]:
        return [one for one in self._active.values() if one.phase is phase]

    def _admit(self) -> None:
        places = self.max_num_seqs - sum(
            one.phase is not Phase.DELIVER for one in self._active.values()
        )
        if places <= 0 or not len(self.queue):
            return
        for entry in self.queue.take(self._admissible(places)):
            self._active[entry.key] = ActiveRequest(entry)

    def _admissible(self, places: int) -> list[QueuedRequest]:
        shapes = {one.entry.batch_key for one in self._active.values()}
        chosen: list[QueuedRequest] = []
        patience = self.max_overtakes
        for one in self.queue.ready():
            if len(chosen) == places or patience <= 0:
                break
            if one.batch_key in shapes or len(shapes) < self.max_shapes:
                shapes.add(one.batch_key)
                chosen.append(one)
                patience -= patience < self.max_overtakes
            else:
                patience = min(patience, self.max_overtakes - one.overtaken)
        return chosen

    def _wave(self, name: str, due: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """The members of one command: of one shape, those that came first."""
        groups: dict[Hashable, list[ActiveRequest]] = defaultdict(list)
        for one in due:
            groups[one.batch_key].append(one)
        if name == STEP:
            key = self._next_shape(groups)
        else:
            key = min(groups, key=lambda key: min(one.entry.order for one in groups[key]))
        group = sorted(groups[key], key=lambda one: one.entry.order)
        if lone := [one for one in group if one.alone]:
            return lone[:1]
        return group[: self._limits.get((name, key), self.max_num_seqs)]

    def _next_shape(self, groups: dict[Hashable, list[ActiveRequest]]) -> Hashable:
        """The shape whose requests have had least of the device. One that comes (back) starts with
        what the others have had: it owes nothing and is owed nothing."""
        present = {key: spent for key, spent in self._spent.items() if key in groups}
        start = min(present.values(), default=0.0)
        self._spent = {key: present.get(key, start) for key in groups}
        return min(
            groups, key=lambda key: (self._spent[key], min(one.entry.order for one in groups[key]))
        )

    def _command(self, name: str, wave: Sequence[ActiveRequest]) -> Command:
        identities = tuple(one.entry.identity for one in wave)
        if name == ENCODE:
            data = pack([one.entry.payload() for one in wave])
        else:
            steps = [one.step for one in wave]
            previews = [bool(one.previews) and one.step + 1 >= one.previews[0] for one in wave]
            data = StageData(
                modality=Modality.LATENT,
                fields={
                    "steps": steps,
                    "keep_clean": previews,
                    "previewed": [one.num_previewed for one in wave],
                },
            )
        return Command(name=name, kind=KINDS[name], identities=identities, data=data)

    # digesting --------------------------------------------------------------------------------

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        held = [self._active.get(identity.key) for identity in command.identities]
        if command.name == STEP:
            steps = results[0].fields["steps"]
            return self._stepped(
                [(one, step) for one, step in zip(held, steps, strict=True) if one]
            )
        emissions: list[Emission] = []
        for one, outcome in zip(held, unpack(results[0]), strict=True):
            if one is None:
                continue
            one.alone = False
            if isinstance(outcome, OmniError):
                emissions.append(self._end(one, outcome))
            elif command.name == ENCODE:
                self._encoded(one, outcome)
            elif command.name == PREVIEW:
                one.previews.pop(0)
                one.num_previewed += 1
                emissions += self._output(one, outcome)
            else:
                one.phase = Phase.DELIVER
                emissions += self._output(one, outcome)
        return emissions

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        one = self._active.get(identity.key)
        if one is None:
            return ()
        if isinstance(outcome, OmniError):
            return (self._end(one, outcome),)
        return self._output(one, outcome)

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        """Members of a batch are tried again, fewer together; alone, a child ends with `error`."""
        held = [one for key in command.identities if (one := self._active.get(key.key))]
        size = len(command.identities)
        if size == 1 or not is_retried(error):
            return [self._end(one, error) for one in held]
        if isinstance(error, OutOfMemoryError) and held:
            self._limits[command.name, held[0].batch_key] = size // 2
        else:
            for one in held:
                one.alone = True
        return ()

    def _stepped(self, moved: Sequence[tuple[ActiveRequest, int]]) -> Iterable[Emission]:
        for one, step in moved:
            one.alone = False
            one.step = step
            if step >= one.total_steps:
                one.phase = Phase.DECODE
        if moved:
            key, cost = moved[0][0].batch_key, moved[0][0].cost
            self._spent[key] = self._spent.get(key, 0.0) + cost
        return ()

    def _encoded(self, one: ActiveRequest, answer: StageData) -> None:
        one.batch_key = answer.fields["batch_key"]
        one.cost = answer.fields["cost"]
        one.total_steps = answer.fields["total_steps"]
        one.previews = preview_steps(one.entry.params.partial_images or 0, one.total_steps)
        one.phase = Phase.DENOISE

    def _output(self, one: ActiveRequest, data: StageData) -> Iterable[Emission]:
        """Nothing yet for an output that is on its way (`deliver` brings it)."""
        if data.fields.get("late"):
            return ()
        if "partial_image_index" in data.fields:
            return (Emission(identity=one.entry.identity, data=data),)
        del self._active[one.key]
        return (final_emission(one.entry.identity, data),)

    def _end(self, one: ActiveRequest, error: OmniError) -> Emission:
        del self._active[one.key]
        return Emission(identity=one.entry.identity, error=error, final=True)


def preview_steps(count: int, total_steps: int) -> list[int]:
    """After how many steps each of `count` previews is due: evenly spread, each before the end;
    fewer where there are too few steps."""
    spread = {round(total_steps * (i + 1) / (count + 1)) for i in range(count)}
    return sorted(step for step in spread if 0 < step < total_steps)
