"""Running one command on all ranks of a replica, from the leader's executing thread."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OmniError,
    StageLostError,
    as_omni_error,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.messages import Progress
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import OUTPUT_LANE, Command, Executor
from omnistage.observability.logging import get_logger
from omnistage.stages.emitter import MessageSink
from omnistage.stages.late_lanes import LateLanes
from omnistage.stages.operations import OperationClock
from omnistage.stages.output_worker import LateOutput
from omnistage.stages.ranks import RankGroup

logger = get_logger(__name__)


def log_scope(command: Command) -> str:
    """Which requests a line logged meanwhile is about."""
    return ",".join(str(identity) for identity in command.identities[:4]) or "-"


class LeaderContext:
    """`ExecutionContext` of rank 0: its checkpoints decide for all ranks."""

    rank = 0

    def __init__(
        self,
        world_size: int,
        ranks: RankGroup,
        clock: OperationClock,
        is_cancelled: Callable[[RequestKey], bool],
        post: MessageSink,
        outputs: LateLanes,
    ) -> None:
        self.world_size = world_size
        self._ranks = ranks
        self._clock = clock
        self._is_cancelled = is_cancelled
        self._post = post
        self._outputs = outputs
        self._late: list[LateOutput] = []
        self._identities: tuple[RequestIdentity, ...] = ()
        self._checkpoint = 0
        self._lockstep = True
        self._told: frozenset[RequestKey] = frozenset()

    def start(self, command: Command) -> None:
        self._identities, self._checkpoint = command.identities, 0
        self._lockstep, self._told = command.lockstep, frozenset[RequestKey]()
        self._late = []
        self._clock.begin(command.kind)

    def checkpoint(self) -> frozenset[RequestKey]:
        """See `ExecutionContext`. Raises the error of a rank that has failed meanwhile."""
        self._clock.touch()
        self._ranks.raise_early_error()
        return self._tell()

    def while_waiting(self) -> None:
        """The leader's part is done; ranks that go on still hear of who is cancelled."""
        if not self._lockstep:
            self._tell()

    def _tell(self) -> frozenset[RequestKey]:
        cancelled = [i for i in self._identities if self._is_cancelled(i.key)]
        keys = frozenset(identity.key for identity in cancelled)
        if self._lockstep or keys != self._told:
            self._ranks.verdict(self._checkpoint, cancelled)
            self._checkpoint += 1
            self._told = keys
        return keys

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        self._post(Progress(identity=identity, step=step, total_steps=total_steps))

    def operation(self, kind: str) -> None:
        self._clock.begin(kind)

    def finish_later(
        self, identity: RequestIdentity, work: Callable[[], StageData], lane: str = OUTPUT_LANE
    ) -> None:
        if not self._is_cancelled(identity.key):
            self._late.append(self._outputs.submit(identity, work, lane))

    def withdraw_late(self) -> None:
        """The command failed: its children may be tried again, and must not be answered twice."""
        self._outputs.withdraw_each(self._late)


class CommandRunner:
    def __init__(
        self, executor: Executor, ranks: RankGroup, clock: OperationClock, context: LeaderContext
    ) -> None:
        self._executor = executor
        self._ranks = ranks
        self._clock = clock
        self._context = context

    def run(self, command: Command) -> list[StageData] | OmniError:
        """The results by rank, or the first error of any rank, which stands for all.

        Raises `StageLostError` when the replica is unusable: a rank is gone, or the executor says
        so of its device.
        """
        self._context.start(command)
        try:
            self._ranks.broadcast(command)
        except InvalidRequestError as error:
            return error
        own = self._execute_here(command)
        self._clock.begin(command.kind)
        limit_s = self._clock.limit_s(command.kind)
        outcomes = [own, *self._ranks.gather(limit_s, self._context.while_waiting)]
        for outcome in outcomes:
            if isinstance(outcome, StageLostError):
                raise outcome
        for outcome in outcomes:
            if isinstance(outcome, OmniError):
                self._context.withdraw_late()
                return outcome
        return [outcome for outcome in outcomes if isinstance(outcome, StageData)]

    def _execute_here(self, command: Command) -> StageData | OmniError:
        try:
            return self._executor.execute(command, self._context)
        except StageLostError:
            raise
        except Exception as error:
            failure = as_omni_error(error, detail=traceback.format_exc())
            if isinstance(failure, InternalError):
                logger.error("command %r failed: %s", command.name, failure.detail)
            self._ranks.abandon()
            return failure
