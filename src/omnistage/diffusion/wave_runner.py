"""One rank's part of a wave: its share of the requests, in step with those it works with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from omnistage.contracts.errors import OmniError, StageLostError, UnavailableError, as_omni_error
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import OUTPUT_LANE, Command, ExecutionContext
from omnistage.diffusion.wave_data import failed_share, nothing, share_of
from omnistage.diffusion.waves import WaveRules
from omnistage.parallel.agreement import Agreement, Vote
from omnistage.parallel.groups import ProcessGroups

FAULT_LIMIT_S = 10.0
"""How long a rank that failed waits for its fellows to vote: they may be inside a step."""
_PHASES = ("encode", "step", "decode")


class Runner(Protocol):
    def execute(self, command: Command, context: ExecutionContext) -> StageData: ...


class WaveContext:
    """`ExecutionContext` of a share. Where ranks go in lockstep they vote before each step: either
    all take it or none. The children are cancelled when all of a synchronized wave's are, or all of
    the share's: what is left of a wave is not worth stopping for."""

    def __init__(
        self,
        context: ExecutionContext,
        agreement: Agreement | None,
        own: tuple[RequestIdentity, ...],
        bound: tuple[RequestIdentity, ...],
        *,
        reports: bool = True,
    ) -> None:
        self.rank = context.rank
        self.world_size = context.world_size
        self.finished = False
        self._context = context
        self._agreement = agreement
        self._own = own
        self._bound = bound
        self._reports = reports
        self._phase = "encode"

    def checkpoint(self) -> frozenset[RequestKey]:
        cancelled = self._context.checkpoint()
        stop = all(one.key in cancelled for one in self._bound)
        if self._agreement is not None:
            stop = self._phase == "step" and self._agreed(stop)
        return frozenset(one.key for one in self._own) if stop else frozenset()

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        """All of a synchronized wave are at the same step."""
        if self._reports and identity == self._own[0]:
            for one in self._bound:
                self._context.progress(one, step, total_steps)

    def operation(self, kind: str) -> None:
        self._phase = kind if kind in _PHASES else self._phase
        self._context.operation(kind)

    def finish_later(
        self, identity: RequestIdentity, work: Callable[[], StageData], lane: str = OUTPUT_LANE
    ) -> None:
        self._context.finish_later(identity, work, lane)

    def done(self) -> None:
        """This rank has taken its last step: so must have all others."""
        if self._agreement is not None and not self.finished:
            least, greatest = self._agreement.vote(Vote.DONE)
            self._refuse(least is not Vote.DONE, greatest)

    def failed(self) -> None:
        """This rank cannot go on; the others hear of it before their next step. Raises
        `StageLostError` when they are inside one, where its part is missing."""
        if self._agreement is not None and not self.finished:
            self.finished = True
            self._agreement.vote(Vote.FAILED, min(FAULT_LIMIT_S, self._agreement.timeout_s))

    def _agreed(self, stop: bool) -> bool:
        assert self._agreement is not None
        least, greatest = self._agreement.vote(Vote.STOP if stop else Vote.GO_ON)
        self._refuse(least is Vote.DONE or greatest is Vote.DONE, greatest)
        self.finished = greatest is Vote.STOP
        return self.finished

    def _refuse(self, out_of_step: bool, greatest: Vote) -> None:
        if greatest is Vote.FAILED:
            self.finished = True
            raise UnavailableError(
                "another rank of this stage failed in the same wave; please retry",
                retry_after_s=1.0,
            )
        if out_of_step:
            raise StageLostError("the ranks of this stage fell out of step; please retry")


class WaveRunner:
    """Runs this rank's share with the `Runner` of a single rank."""

    def __init__(self, runner: Runner, groups: ProcessGroups, rules: WaveRules) -> None:
        self._runner = runner
        self._rules = rules
        self._place = groups.rank_in("data")
        self._leads = groups.rank == rules.leaders[self._place]
        self._agreement = Agreement(groups, rules.lockstep) if rules.lockstep else None

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        """The share's result on the rank that leads it, `nothing` on others. A share that fails by
        itself is a result too; in a synchronized wave it fails the command."""
        share = share_of(command, self._place, fill=self._rules.synchronized)
        if share is None:
            return nothing()
        own = share.command.identities
        bound = command.identities if self._rules.synchronized else own
        reports = self._leads and (self._place == 0 or not self._rules.synchronized)
        wave = WaveContext(context, self._agreement, own, bound, reports=reports)
        result = self._run(share.command, wave)
        return result if share.is_own and self._leads else nothing()

    def _run(self, command: Command, wave: WaveContext) -> StageData:
        try:
            result = self._runner.execute(command, wave)
            wave.done()
        except StageLostError:
            raise
        except Exception as error:
            wave.failed()
            failure: OmniError = as_omni_error(error)
            if self._rules.synchronized:
                raise failure from None
            return failed_share(failure)
        return result
