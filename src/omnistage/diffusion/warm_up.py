"""A request of nobody's, to have everything compiled before the first real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from omnistage.contracts.errors import ConfigurationError, OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.diffusion.active import ENCODE, STEP
from omnistage.diffusion.batching import pack, unpack

if TYPE_CHECKING:
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


def warm_up_request(height: int, width: int) -> dict[str, Any]:
    """The identities and the data of its "encode" command; guided, where the defaults guide."""
    params = OmniDiffusionSamplingParams(
        height=height, width=width, num_inference_steps=_STEPS, seed=0
    )
    payload = StageData(
        modality=Modality.TEXT, fields={"prompt": "warm-up", "params": msgspec.to_builtins(params)}
    )
    identity = RequestIdentity(request_id="warm-up")
    return {"identities": (identity,), "data": pack([payload])}


def warm_up(runner: StepRunner, height: int, width: int) -> None:
    """Run one request of that size without output, as far as its second step."""
    context = SilentContext()
    request = warm_up_request(height, width)
    try:
        encode = Command(name=ENCODE, kind=ENCODE, **request)
        (answer,) = unpack(runner.execute(encode, context))
        if isinstance(answer, OmniError):
            raise ConfigurationError(f"warm-up at {width}x{height}: {answer.message}")
        for step in range(2):
            fields = {"steps": [step], "keep_clean": [False], "previewed": [0]}
            data = StageData(modality=Modality.LATENT, fields=fields)
            identities = request["identities"]
            command = Command(name=STEP, kind=STEP, identities=identities, data=data)
            runner.execute(command, context)
    finally:
        for identity in request["identities"]:
            runner.release(identity.key)
