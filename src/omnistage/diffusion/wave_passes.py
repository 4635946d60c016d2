"""Step mode on ranks whose denoiser is collective: every pass is all ranks' or nobody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from omnistage.contracts.errors import StageLostError, UnavailableError
from omnistage.diffusion.failures import classify
from omnistage.parallel.agreement import Agreement, Vote

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

FAULT_LIMIT_S = 10.0
"""How long a rank that failed waits for its fellows to vote: they may be inside a pass."""


class AbortedPass(UnavailableError):
    """Another rank cannot go on: no request has moved."""


class Passes:
    """Ranks vote in front of each pass of `denoiser`, and when they have no further one. Then, with
    `fill`, a rank makes spare passes as long as another needs one; without, all have equally many.

    A fault between passes ends the command for all ranks. Inside one it does when all fail alike,
    or when the others come through: unless `gathered`, where what they hold of the weights would
    differ by then. A rank that is missing inside a pass is lost.
    """

    def __init__(
        self, agreement: Agreement, denoiser: nn.Module, *, fill: bool, gathered: bool
    ) -> None:
        self._agreement = agreement
        self._fill = fill
        self._gathered = gathered
        self._under_way = False
        self._finished = True
        self._inside = False
        self._is_spare = False
        self._hooks = [
            denoiser.register_forward_pre_hook(self._before),
            denoiser.register_forward_hook(self._after),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """A command with steps begins, on all ranks."""
        self._under_way, self._finished, self._inside = True, False, False

    def end(self) -> None:
        self._under_way = False

    def take(self, predict: Callable[[], T], spare: Callable[[], object]) -> T:
        """What `predict` returns, which makes this rank's passes, when all ranks have made theirs.
        `spare` makes one that nobody needs. Raises `AbortedPass` when another rank fails."""
        try:
            result = predict()
            self._done(spare)
        except Exception as error:
            failure = classify(error, None, 0)
            if not isinstance(failure, StageLostError):
                self.agree_to_retry(False)
            raise failure from None
        return result

    def join(self, spare: Callable[[], object]) -> None:
        """For a rank that has no passes of its own, or has made them."""
        if not self._finished:
            self.take(lambda: None, spare)

    def agree_to_retry(self, wish: bool) -> bool:
        """After a failed pass: whether all ranks have failed in it and all wish to try it again
        in another way. Else nobody does."""
        if self._finished or not self._failed():
            return False
        _, greatest = self._vote(Vote.GO_ON if wish else Vote.STOP, FAULT_LIMIT_S)
        self._finished = greatest is not Vote.GO_ON
        return not self._finished

    # votes ------------------------------------------------------------------------------------

    def _before(self, module: Any, args: Any) -> None:
        if self._under_way and not self._is_spare:
            least, greatest = self._vote(Vote.GO_ON)
            self._heed(greatest, out_of_step=least is not greatest and not self._fill)
        self._inside = self._under_way

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self._inside = False

    def _done(self, spare: Callable[[], object]) -> None:
        while True:
            least, greatest = self._vote(Vote.DONE)
            self._heed(greatest, out_of_step=least is not greatest and not self._fill)
            if least is Vote.DONE:
                self._finished = True
                return
            self._is_spare = True
            try:
                spare()
            finally:
                self._is_spare = False

    def _failed(self) -> bool:
        """Tell the others. Whether all have failed in this pass."""
        if self._finished:
            return False
        inside, self._inside = self._inside, False
        least, _ = self._vote(Vote.FAILED, FAULT_LIMIT_S)
        all_failed = least is Vote.FAILED
        self._finished = not all_failed
        if inside and self._gathered and not all_failed:
            raise StageLostError("a rank failed inside a step that others completed; please retry")
        return all_failed

    def _heed(self, greatest: Vote, *, out_of_step: bool) -> None:
        if greatest is Vote.FAILED:
            self._finished = True
            raise AbortedPass(
                "another rank of this stage failed in the same step; please retry",
                retry_after_s=1.0,
            )
        if out_of_step:
            raise StageLostError("the ranks of this stage fell out of step; please retry")

    def _vote(self, own: Vote, limit_s: float | None = None) -> tuple[Vote, Vote]:
        timeout_s = self._agreement.timeout_s
        return self._agreement.vote(own, None if limit_s is None else min(limit_s, timeout_s))
