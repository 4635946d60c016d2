"""A request of nobody's, to have everything compiled before the first real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from omnistage.contracts.errors import ConfigurationError, InvalidRequestError, OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.diffusion.active import ENCODE, STEP
from omnistage.diffusion.batching import pack, unpack
from omnistage.diffusion.request_scheduler import GENERATE

if TYPE_CHECKING:
    from omnistage.diffusion.request_runner import RequestRunner
    from omnistage.diffusion.step_runner import StepRunner

_STEPS = 3


class SilentContext:
    """An `ExecutionContext` that nobody listens to."""

    rank = 0
    world_size = 1

    def checkpoint(self) -> frozenset[RequestKey]:
        return frozenset()

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        """Nobody waits for it."""

    def operation(self, kind: str) -> None:
        """Loading has its own clock."""

    def finish_later(self, identity: RequestIdentity, work: Callable[[], StageData]) -> None:
        """A warm-up has no output."""


def warm_up(
    runner: StepRunner | RequestRunner, height: int, width: int, *, with_picture: bool, count: int
) -> None:
    """Run `count` requests of that size together, without anybody to take their output: by steps as
    far as the second one. Their prompts differ in length. A compiler takes a batch of one for a
    special case, so run one alone and two together.

    Raises `ConfigurationError` for a size that the model refuses.
    """
    payloads = [
        _payload(height, width, "warm-up " * (1 + number), with_picture=with_picture)
        for number in range(count)
    ]
    if hasattr(runner, "num_states"):
        _run_steps(runner, payloads, height, width)
    else:
        _run_call(runner, payloads, height, width)


def _payload(height: int, width: int, prompt: str, *, with_picture: bool) -> StageData:
    params = OmniDiffusionSamplingParams(
        height=height, width=width, num_inference_steps=_STEPS, seed=0
    )
    picture = {"image_0": np.zeros((height, width, 3), np.uint8)} if with_picture else {}
    return StageData(
        modality=Modality.TEXT,
        fields={"prompt": prompt, "params": msgspec.to_builtins(params)},
        tensors=picture,
    )


def _identities(payloads: Sequence[StageData]) -> tuple[RequestIdentity, ...]:
    return tuple(RequestIdentity(request_id=f"warm-up-{index}") for index in range(len(payloads)))


def _run_call(runner: Any, payloads: Sequence[StageData], height: int, width: int) -> None:
    command = Command(name=GENERATE, identities=_identities(payloads), data=pack(payloads))
    try:
        runner.execute(command, SilentContext())
    except InvalidRequestError as error:
        message = f"warm-up at {width}x{height}: {error.message}"
        raise ConfigurationError(message) from error


def _run_steps(runner: Any, payloads: Sequence[StageData], height: int, width: int) -> None:
    context = SilentContext()
    count, identities = len(payloads), _identities(payloads)
    try:
        encode = Command(name=ENCODE, kind=ENCODE, identities=identities, data=pack(payloads))
        for answer in unpack(runner.execute(encode, context)):
            if isinstance(answer, OmniError):
                raise ConfigurationError(f"warm-up at {width}x{height}: {answer.message}")
        for step in range(2):
            fields = {name: [value] * count for name, value in _idle_step(step).items()}
            data = StageData(modality=Modality.LATENT, fields=fields)
            runner.execute(Command(name=STEP, kind=STEP, identities=identities, data=data), context)
    finally:
        for identity in identities:
            runner.release(identity.key)


def _idle_step(step: int) -> dict[str, Any]:
    return {"steps": step, "keep_clean": False, "previewed": 0}
