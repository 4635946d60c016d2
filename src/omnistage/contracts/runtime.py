"""What a runtime (token, denoising, generation, toy …) must offer to be hosted as a stage.

A replica is a leader and N ranks. The leader owns a `Scheduler`: it holds the requests and decides
the next `Command`. Every rank, the leader's own included, owns an `Executor`: it carries commands
out, in order, and decides nothing. Together they are one failure unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omnistage.contracts.errors import OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage


OUTPUT_LANE, INPUT_LANE = LANES = ("output", "input")
"""What `ExecutionContext.finish_later` tells apart: each lane has its own thread and order."""


@dataclass(slots=True, kw_only=True)
class StageRequest:
    """One child of a request as a scheduler sees it. `data` has been through the input adapter."""

    identity: RequestIdentity
    data: StageData
    params: SamplingParams
    input_complete: bool = True


@dataclass(slots=True, kw_only=True)
class Command:
    """A unit of work for all ranks. `name` is the executor's; `kind` selects its deadline.

    `data` must hold everything the executors need that they do not hold already.

    With `lockstep` every rank passes the same checkpoints, and each waits for the leader there.
    Without, each rank passes as many as it likes and is told what the leader has said so far.
    """

    name: str
    kind: str = "forward"
    identities: tuple[RequestIdentity, ...]
    data: StageData
    lockstep: bool = True


@dataclass(slots=True, kw_only=True)
class Emission:
    """Something a scheduler has to say about one child: exactly one of data, error.

    `final` ends the child at this stage. An `error` ends it too.
    """

    identity: RequestIdentity
    data: StageData | None = None
    error: OmniError | None = None
    final: bool = False
    output_index: int = 0
    finish_reason: str | None = None
    timings_s: dict[str, float] = field(default_factory=dict)


class ExecutionContext(Protocol):
    """The executing thread's way to the outside while a command runs."""

    rank: int
    world_size: int

    def checkpoint(self) -> frozenset[RequestKey]:
        """Children of this command that were cancelled, the same answer on every rank.

        Call it between steps (every rank equally often); it also marks liveness. For a command
        without `lockstep` ranks may learn it at different times, and call it as often as they like.
        """

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        """Report progress, on one of the ranks that work on this child. What another rank than
        the leader's reports arrives a little later. Never blocks."""

    def operation(self, kind: str) -> None:
        """Name what comes next ("load", "compile", "forward", "step", "decode"): each kind has its
        own deadline, and the clock starts anew."""

    def finish_later(
        self, identity: RequestIdentity, work: Callable[[], StageData], lane: str = OUTPUT_LANE
    ) -> None:
        """Run `work` on the thread of a `LANES` lane while commands go on; its outcome comes back
        to `Scheduler.deliver`, in the order given in that lane (rank 0 only; ignored elsewhere).

        For what a step need not wait for: the end of a copy to the host, building the payload.
        `work` owns what it holds, and sets thread-local modes (torch's grad mode) itself. An error
        in it is its child's alone. Nothing is delivered for a child that is cancelled, or for a
        command that fails. Waits while many works are pending; each has the limit of operation
        "output", past which the replica is lost (`StageLostError`). Lane "input" is for making
        inputs ready (templates, tokenizers, media processors), which may take long: it delays no
        output, its limit is that of operation "encode", and calls to the replica do not wait for
        it.
        """


LoadReporter = Callable[[str, float | None], None]
"""Called with a note and a fraction in [0, 1] (or None) while a model loads."""


class Scheduler(Protocol):
    """The leader's half. Called by one thread only.

    One that also has `stats() -> dict[str, float]` is asked for it now and then; heartbeats carry
    the answer to the engine's metrics.
    """

    def add(self, request: StageRequest) -> None: ...

    def append_input(self, identity: RequestIdentity, data: StageData, epoch: int) -> None: ...

    def end_input(self, identity: RequestIdentity, epoch: int) -> None: ...

    def set_credits(self, key: RequestKey, credits: int) -> None:
        """How many outputs this child may still emit before it must pause. Its first credits are
        told before it is added and again right after."""

    def abort(self, key: RequestKey) -> None:
        """Forget a child. Called between commands; unknown keys are ignored."""

    def next_command(self) -> Command | None:
        """The next unit of work, or None when there is nothing to do now."""

    def complete(self, command: Command, results: Sequence[StageData]) -> Iterable[Emission]:
        """Digest the results (by rank) of the command that `next_command` returned."""

    def fail(self, command: Command, error: OmniError) -> Iterable[Emission]:
        """The command failed on every rank or on some: say what becomes of its children."""

    def deliver(
        self, identity: RequestIdentity, outcome: StageData | OmniError
    ) -> Iterable[Emission]:
        """The outcome of a work given to `ExecutionContext.finish_later`, after the `complete` of
        its command. Keep a child, and count it, until its last one is delivered or it ends."""

    def next_wake_s(self) -> float | None:
        """After `next_command` returned None: seconds until it may have something although nothing
        arrives, None when only mail can change that."""

    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""


@runtime_checkable
class HasControls(Protocol):
    """A scheduler that answers calls to its replica itself (`Control`), by method. What it does not
    name goes to the executor."""

    def controls(self) -> Mapping[str, Callable[..., Any]]: ...


class Executor(Protocol):
    """One rank's half. Called by one thread only."""

    def load(self, report: LoadReporter) -> dict[str, Any]:
        """Build the model. Returns a description for logs and `/v1/models`."""

    def execute(self, command: Command, context: ExecutionContext) -> StageData: ...

    def release(self, key: RequestKey) -> None:
        """Free what is held for this child (also after a failure or a cancel)."""

    def control(self, method: str, arguments: dict[str, Any]) -> Any: ...

    def close(self) -> None:
        """Free everything. Idempotent."""


@runtime_checkable
class JoinsRanks(Protocol):
    """An executor whose ranks talk to each other without their leader."""

    def join(self, rendezvous: str) -> None:
        """Where the ranks of this replica meet (see `omnistage.parallel.rendezvous`). Called once,
        before `load`, in a replica of several ranks."""


InputAdapter = Callable[[StageData, SamplingParams, Executor], StageData]
"""Turns an upstream stage's output into this stage's input, in the consuming replica."""


class StageRuntime(Protocol):
    """The object that `StageConfig.runtime` names by import string (`"package.module:Name"`)."""

    @staticmethod
    def scheduler(stage: ResolvedStage) -> Scheduler: ...

    @staticmethod
    def executor(stage: ResolvedStage, rank: int, world_size: int) -> Executor: ...
