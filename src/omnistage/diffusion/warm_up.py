"""A request of nobody's, to have everything compiled before the first real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from omnistage.contracts.errors import ConfigurationError, InvalidRequestError, OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import OUTPUT_LANE, Command
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

    def finish_later(
        self, identity: RequestIdentity, work: Callable[[], StageData], lane: str = OUTPUT_LANE
    ) -> None:
        """A warm-up has no output."""


def warm_up_steps(
    runner: StepRunner, height: int, width: int, *, with_picture: bool, count: int
) -> None:
    """Run `count` requests of that size together as far as their second step. Their prompts differ
    in length. A compiler takes a batch of one for a special case: run one alone and two together.

    Raises `ConfigurationError` for a size that the model refuses.
    """
    identities, payloads = _requests(height, width, with_picture=with_picture, count=count)
    context = SilentContext()
    try:
        encode = Command(name=ENCODE, kind=ENCODE, identities=identities, data=pack(payloads))
        for answer in unpack(runner.execute(encode, context)):
            if isinstance(answer, OmniError):
                raise ConfigurationError(f"warm-up at {width}x{height}: {answer.message}")
        for step in range(2):
            idle = {"steps": step, "keep_clean": False, "previewed": 0}
            fields = {name: [value] * count for name, value in idle.items()}
            data = StageData(modality=Modality.LATENT, fields=fields)
            runner.execute(Command(name=STEP, kind=STEP, identities=identities, data=data), context)
    finally:
        for identity in identities:
            runner.release(identity.key)


def warm_up_call(
    runner: RequestRunner, height: int, width: int, *, with_picture: bool, count: int
) -> None:
    """As `warm_up_steps`, by one short call of the pipeline."""
    identities, payloads = _requests(height, width, with_picture=with_picture, count=count)
    try:
        runner.execute(
            Command(name=GENERATE, identities=identities, data=pack(payloads)), SilentContext()
        )
    except InvalidRequestError as error:
        message = f"warm-up at {width}x{height}: {error.message}"
        raise ConfigurationError(message) from error


def _requests(
    height: int, width: int, *, with_picture: bool, count: int
) -> tuple[tuple[RequestIdentity, ...], list[StageData]]:
    identities = tuple(RequestIdentity(request_id=f"warm-up-{index}") for index in range(count))
    prompts = ["warm-up " * (1 + index) for index in range(count)]
    return identities, [
        _payload(height, width, prompt, with_picture=with_picture) for prompt in prompts
    ]


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
