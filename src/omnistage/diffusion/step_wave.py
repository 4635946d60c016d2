"""One denoising step for several requests at once, and a failure moves nobody halfway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import OmniError, OutOfMemoryError, StageLostError
from omnistage.diffusion.failures import classify
from omnistage.diffusion.family import StepFamily, StepRequestState
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    import torch

    from omnistage.diffusion.wave_passes import Passes

logger = get_logger(__name__)


class StepWave:
    """Guidance branches that do not fit together, not even of one request, are computed one after
    the other, as long as any request of that shape is here. `free_memory` gives unused memory back
    to the device. `passes`: those of the denoiser are made together with other ranks."""

    def __init__(self, family: StepFamily, free_memory: Callable[[], None]) -> None:
        self.passes: Passes | None = None
        self._family = family
        self._free_memory = free_memory
        self._branch_by_branch: set[str] = set()

    def step(self, wave: Sequence[tuple[StepRequestState, bool]]) -> None:
        """Move each request one step on, and note its predicted clean latent where that is wanted.

        When it raises, each request has moved or has not: its `step_index` tells.
        """
        predictions = self._taken([state for state, _ in wave])
        for (state, keep_clean), prediction in zip(wave, predictions, strict=True):
            clean = self._family.predict_clean(state, prediction) if keep_clean else None
            with unchanged_on_failure(state.scheduler):
                self._family.step_scheduler(state, prediction)
            state.clean = clean

    def keep(self, shapes: Iterable[str]) -> None:
        """Try the branches of all other shapes together again, when they come."""
        if self._branch_by_branch:
            self._branch_by_branch &= set(shapes)

    def _taken(self, states: Sequence[StepRequestState]) -> list[torch.Tensor]:
        if self.passes is None:
            return self._predict(states)
        return self.passes.take(
            lambda: self._predict(states), lambda: self._family.pass_once(states[0])
        )

    def _predict(self, states: Sequence[StepRequestState]) -> list[torch.Tensor]:
        shape = shape_of(states[0])
        if shape in self._branch_by_branch:
            return self._apart(states)
        if len(states) > 1:
            return self._family.denoise_step(states)
        try:
            return self._family.denoise_step(states)
        except Exception as error:
            failure = _meaning(error, states[0])
        divisible = self._family.in_one_batch and len(states[0].branches) > 1
        if not self._is_tried_again(failure, isinstance(failure, OutOfMemoryError) and divisible):
            raise failure
        self._free_memory()
        logger.warning(
            "the %d guidance branches of request %s do not fit in memory together; those of its "
            "shape are computed one after the other while there are any",
            len(states[0].branches),
            states[0].identity,
        )
        self._branch_by_branch.add(shape)
        return self._apart(states)

    def _is_tried_again(self, failure: OmniError, wish: bool) -> bool:
        if self.passes is None or isinstance(failure, StageLostError):
            return wish
        return self.passes.agree_to_retry(wish)

    def _apart(self, states: Sequence[StepRequestState]) -> list[torch.Tensor]:
        before, self._family.in_one_batch = self._family.in_one_batch, False
        try:
            return self._family.denoise_step(states)
        finally:
            self._family.in_one_batch = before


def shape_of(state: StepRequestState) -> str:
    """Equal for requests that share a forward."""
    return repr((tuple(state.latents.shape[1:]), state.forward_key))


@contextmanager
def unchanged_on_failure(scheduler: Any) -> Iterator[None]:
    """Multistep schedulers shift their history in place before they compute: a second try after a
    failure must find what the first one found."""
    before = {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(scheduler).items()
    }
    try:
        yield
    except BaseException:
        vars(scheduler).clear()
        vars(scheduler).update(before)
        raise


def _meaning(error: Exception, state: StepRequestState) -> OmniError:
    """For a request that ran alone: latents of a wrong shape are found out by its first step."""
    return classify(error, state.inputs, state.step_index + 1)
