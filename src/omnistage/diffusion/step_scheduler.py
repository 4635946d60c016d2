"""Step mode: requests join and leave between denoising steps.

A request is encoded, takes its steps in waves with others of its shape, and is decoded. Encoding,
previews and decoding are commands of their own, each for as many requests as are due.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from omnistage.contracts.errors import OmniError, OutOfMemoryError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest
from omnistage.diffusion.active import (
    DECODE,
    ENCODE,
    KINDS,
    PREVIEW,
    STEP,
    ActiveRequest,
    Phase,
)
from omnistage.diffusion.batch_limits import BatchLimits
from omnistage.diffusion.batching import pack, unpack
from omnistage.diffusion.queue import QueuedRequest, WaitingQueue
from omnistage.diffusion.request_scheduler import final_emission, is_retried
from omnistage.diffusion.turns import turn


@dataclass(slots=True)
class StepScheduler:
    """At most `max_num_seqs` requests denoise at a time, of at most `max_shapes` different shapes.
    One that waits for its reader to take a preview before it may end holds no place.

    Shapes take turns (`turn`): first come, first served, but small requests slip in. When no more
    shapes fit, admission looks past a request of another shape, at most `max_overtakes` times; then
    it waits until that one is in. After a batch ran out of memory, batches of that shape stay below
    its size while it is here; after any other failure each of its members runs alone once.
    """

    queue: WaitingQueue
    max_num_seqs: int = 1
    max_shapes: int = 4
    max_overtakes: int = 16
    _active: dict[RequestKey, ActiveRequest] = field(default_factory=dict)
    _work_done: int = 0
    _limits: BatchLimits = field(init=False)
    _just_encoded: bool = False

    def __post_init__(self) -> None:
        self._limits = BatchLimits(self.max_num_seqs)

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
        self.keep_limits()
        self.admit()
        choice = self.choice()
        return None if choice is None else self.begin(*choice)

    def keep_limits(self) -> None:
        """Forget what was learnt of shapes of which nobody is here."""
        if self._active:  # None is the shape of all that are not encoded yet
            self._limits.keep({None, *(one.batch_key for one in self._active.values())})
        else:
            self._limits.keep(())

    def choice(self) -> tuple[str, list[ActiveRequest]] | None:
        """What frees or fills places comes first: decode, previews, encode; then a step. Between
        two encodings those that denoise take a step, however many arrive."""
        active = list(self._active.values())
        encoding = [one for one in active if one.phase is Phase.ENCODE]
        denoising = [one for one in active if one.phase is Phase.DENOISE]
        for name, due in (
            (DECODE, [one for one in active if one.decode_is_due]),
            (PREVIEW, [one for one in denoising if one.preview_is_due]),
            (ENCODE, [] if self._just_encoded and denoising else encoding),
            (STEP, denoising),
        ):
            if due:
                return name, self._wave(name, due)
        return None

    def begin(self, name: str, wave: Sequence[ActiveRequest]) -> Command:
        """The command of a `choice`, which is to be carried out."""
        if name in (ENCODE, STEP):
            self._just_encoded = name == ENCODE
        return _command(name, wave)

    def admit(self, most: int | None = None) -> int:
        """Take in as many as there are places for, and no more than `most`; returns how many."""
        holding = [one for one in self._active.values() if one.holds_place]
        places = self.max_num_seqs - len(holding)
        places = places if most is None else min(places, most)
        if places <= 0 or not len(self.queue):
            return 0
        shapes = {one.entry.batch_key for one in holding}
        admitted = self.queue.take(self._admissible(places, shapes))
        for entry in admitted:
            self._active[entry.key] = ActiveRequest(entry, work_before=self._work_done)
        return len(admitted)

    @property
    def load(self) -> tuple[int, int]:
        """How many are here, and the work of the steps that they have to take."""
        active = self._active.values()
        left = (one.cost * max(0, one.total_steps - one.step) for one in active)
        return sum(one.holds_place for one in active), sum(left)

    def holds(self, key: RequestKey) -> bool:
        return key in self._active

    def _admissible(self, places: int, shapes: set[Hashable]) -> list[QueuedRequest]:
        """The first that fit. Those who come after one that does not fit overtake it: they are no
        more than it still has patience for."""
        chosen: list[QueuedRequest] = []
        left = places
        for one in self.queue.ready():
            if left <= 0:
                break
            if one.batch_key in shapes or len(shapes) < self.max_shapes:
                shapes.add(one.batch_key)
                chosen.append(one)
                left -= 1
            else:
                left = min(left, self.max_overtakes - one.overtaken)
        return chosen

    def _wave(self, name: str, due: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """The members of one command: of one shape, the most urgent or those that came first."""
        group = turn(due) if name == STEP else _of_first_shape(due)
        if lone := [one for one in group if one.alone]:
            return lone[:1]
        return group[: self._limits.of(name, group[0].batch_key)]

    # digesting --------------------------------------------------------------------------------

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        held = [self._active.get(identity.key) for identity in command.identities]
        for one in held:
            if one is not None:
                one.alone = False
        if command.name == STEP:
            steps = results[0].fields["steps"]
            self._stepped([(one, step) for one, step in zip(held, steps, strict=True) if one])
            return ()
        emissions: list[Emission] = []
        for one, outcome in zip(held, unpack(results[0]), strict=True):
            if one is not None:
                emissions += self._digest(command.name, one, outcome)
        return emissions

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        one = self._active.get(identity.key)
        if one is None:
            return ()
        one.num_in_flight -= 1
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
            self._limits.did_not_fit(command.name, held[0].batch_key, size)
        else:
            for one in held:
                one.alone = True
        return ()

    def _stepped(self, moved: Sequence[tuple[ActiveRequest, int]]) -> None:
        for one, step in moved:
            self._work_done += one.cost
            one.moved_to(step)

    def _digest(
        self, name: str, one: ActiveRequest, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        if isinstance(outcome, OmniError):
            return (self._end(one, outcome),)
        if name == ENCODE:
            one.begin(**{key: outcome.fields[key] for key in ("batch_key", "cost", "total_steps")})
            return ()
        if name == PREVIEW:
            one.previewed()
        else:
            one.phase = Phase.DELIVER
        return self._output(one, outcome)

    def _output(self, one: ActiveRequest, data: StageData) -> Iterable[Emission]:
        """Nothing yet for an output that is on its way (`deliver` brings it)."""
        if data.fields.get("late"):
            one.num_in_flight += 1
            return ()
        if "partial_image_index" in data.fields:
            return (Emission(identity=one.entry.identity, data=data),)
        del self._active[one.key]
        return (final_emission(one.entry.identity, data),)

    def _end(self, one: ActiveRequest, error: OmniError) -> Emission:
        del self._active[one.key]
        return Emission(identity=one.entry.identity, error=error, final=True)


def _of_first_shape(due: Sequence[ActiveRequest]) -> list[ActiveRequest]:
    ranked = sorted(due, key=lambda one: one.order)
    return [one for one in ranked if one.batch_key == ranked[0].batch_key]


def _command(name: str, wave: Sequence[ActiveRequest]) -> Command:
    if name == ENCODE:
        data = pack([one.entry.payload() for one in wave])
    else:
        fields = {
            "steps": [one.step for one in wave],
            "keep_clean": [one.wants_clean_after_next_step() for one in wave],
            "previewed": [one.num_previewed for one in wave],
        }
        data = StageData(modality=Modality.LATENT, fields=fields)
    identities = tuple(one.entry.identity for one in wave)
    return Command(name=name, kind=KINDS[name], identities=identities, data=data)
