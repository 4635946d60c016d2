"""One rank's part of step mode: its share of each command, its passes with those of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from omnistage.contracts.errors import (
    InternalError,
    OmniError,
    OutOfMemoryError,
    StageLostError,
    as_omni_error,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import OUTPUT_LANE, Command, ExecutionContext
from omnistage.diffusion.active import ENCODE, STEP
from omnistage.diffusion.batching import pack, unpack
from omnistage.diffusion.failures import classify
from omnistage.diffusion.step_runner import StepRunner
from omnistage.diffusion.wave_data import nothing
from omnistage.diffusion.wave_passes import AbortedPass, Passes
from omnistage.diffusion.wave_step_data import SHARES, StepShare, aborted, unpack_shares
from omnistage.diffusion.waves import WaveRules
from omnistage.observability.logging import get_logger
from omnistage.parallel.agreement import Agreement
from omnistage.parallel.groups import ProcessGroups

if TYPE_CHECKING:
    from torch import nn

logger = get_logger(__name__)

Work = Callable[[], StageData]


class ShareContext:
    """`ExecutionContext` of a share: the command's one checkpoint has been passed. What is finished
    later waits for the share's success, since a share that fails is tried again."""

    def __init__(
        self, context: ExecutionContext, cancelled: frozenset[RequestKey], *, leads: bool
    ) -> None:
        self.rank = context.rank
        self.world_size = context.world_size
        self._context = context
        self._cancelled = cancelled
        self._leads = leads
        self._late: list[tuple[RequestIdentity, Work, str]] = []

    def checkpoint(self) -> frozenset[RequestKey]:
        return self._cancelled

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        if self._leads:
            self._context.progress(identity, step, total_steps)

    def operation(self, kind: str) -> None:
        self._context.operation(kind)

    def finish_later(self, identity: RequestIdentity, work: Work, lane: str = OUTPUT_LANE) -> None:
        self._late.append((identity, work, lane))

    def completed(self, command: Command, result: StageData) -> StageData:
        """The share's result. Only the first rank has a thread that finishes outputs; others wait
        for theirs and send them along."""
        if self.rank == 0:
            for identity, work, lane in self._late:
                self._context.finish_later(identity, work, lane)
            return result
        if not self._late:
            return result
        parts = dict(zip([one.key for one in command.identities], unpack(result), strict=True))
        parts |= {identity.key: _outcome_of(work) for identity, work, _ in self._late}
        return pack(list(parts.values()))


def _outcome_of(work: Work) -> StageData | OmniError:
    try:
        return work()
    except StageLostError:
        raise
    except Exception as error:
        return as_omni_error(error).with_traceback(None)


class StepShares:
    """Runs this rank's shares with the `StepRunner` of a single rank.

    Ranks of one place hold the same requests and take the same steps; the first of them makes the
    outputs. With `rules.synchronized` every rank encodes all requests, so that it can make passes
    for any of them.
    """

    def __init__(
        self,
        runner: StepRunner,
        groups: ProcessGroups,
        rules: WaveRules,
        denoiser: nn.Module,
        *,
        gathered: bool,
        free_memory: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._rules = rules
        self._place = groups.rank_in("data")
        self._leads = groups.rank == rules.leaders[self._place]
        self._free_memory = free_memory
        self._passes: Passes | None = None
        if rules.lockstep is not None:
            self._passes = Passes(
                Agreement(groups, rules.lockstep),
                denoiser,
                fill=rules.synchronized,
                gathered=gathered,
            )
            runner.take_together(self._passes)

    def knows(self, command: Command) -> bool:
        return command.name == SHARES

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        """Parts: what became of each share on this rank, `nothing` for another's."""
        cancelled = context.checkpoint()
        shares = unpack_shares(command)
        passes = self._passes if any(one.command.name == STEP for one in shares) else None
        if passes is not None:
            passes.begin()
        results: list[StageData | OmniError] = []
        for share in shares:
            wave = ShareContext(context, cancelled, leads=self._leads)
            results.append(self._result(share, wave))
        if passes is not None:
            results[0] = self._joined(passes, results)
            passes.end()
        return pack(results)

    def close(self) -> None:
        if self._passes is not None:
            self._passes.close()

    def _result(self, share: StepShare, wave: ShareContext) -> StageData | OmniError:
        name, is_own = share.command.name, share.place == self._place
        if not (is_own or (self._rules.synchronized and name == ENCODE)):
            return nothing()
        if not (self._leads or name in (ENCODE, STEP)):
            return nothing()
        result = self._outcome(lambda: self._run(share.command, wave))
        return result if isinstance(result, OmniError) or is_own else nothing()

    def _run(self, command: Command, wave: ShareContext) -> StageData:
        return wave.completed(command, self._runner.execute(command, wave))

    def _joined(
        self, passes: Passes, results: Sequence[StageData | OmniError]
    ) -> StageData | OmniError:
        """The first of `results`, unless the passes that are still to be made fail."""

        def join() -> StageData:
            passes.join(self._runner.spare_pass)
            return nothing()

        if any(isinstance(one, OmniError) for one in results):
            passes.agree_to_retry(False)
            return results[0]
        outcome = self._outcome(join)
        return outcome if isinstance(outcome, OmniError) else results[0]

    def _outcome(self, run: Work) -> StageData | OmniError:
        try:
            return run()
        except AbortedPass:
            return aborted()
        except Exception as error:
            failure = classify(error, None, 0)
        if isinstance(failure, StageLostError):
            raise failure
        if isinstance(failure, OutOfMemoryError):
            self._free_memory()
        elif isinstance(failure, InternalError):
            logger.error("a share of a command failed: %s", failure.detail)
        return failure
