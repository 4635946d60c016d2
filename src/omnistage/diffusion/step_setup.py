"""From a request's payload to its state in step mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import (
    InvalidRequestError,
    OmniError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.payloads import StageData
from omnistage.diffusion.arguments import call_arguments
from omnistage.diffusion.failures import classify
from omnistage.diffusion.family import StepFamily, StepRequestState
from omnistage.diffusion.generators import make_generator
from omnistage.diffusion.inputs import DiffusionInputs, read_inputs
from omnistage.diffusion.late_pictures import PictureOutput
from omnistage.diffusion.options import DiffusionOptions
from omnistage.diffusion.overrides import request_scheduler
from omnistage.diffusion.signature import signature_of
from omnistage.diffusion.step_encode import StepEncoder
from omnistage.diffusion.step_runner import StepRunner
from omnistage.diffusion.variants import PipelineVariants

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.diffusion.fast_path import FastPath
    from omnistage.platforms.base import Platform

_PER_STAGE = ("vae_tiling", "vae_slicing")


def make_step_runner(
    stage: ResolvedStage,
    options: DiffusionOptions,
    variants: PipelineVariants,
    fast_path: FastPath,
    platform: Platform,
    device: str,
) -> StepRunner:
    family = fast_path.family
    assert family is not None, "check_mode refuses step mode without a family"
    maker = StateMaker(variants, family, options, stage.default_sampling_params, device)
    return StepRunner(
        family,
        PictureOutput(platform, device),
        StepEncoder(family, maker, explain),
        free_memory=lambda: platform.empty_cache(device),
    )


class StateMaker:
    """Reads and checks one request, without running any part of the model."""

    def __init__(
        self,
        variants: PipelineVariants,
        family: StepFamily,
        options: DiffusionOptions,
        defaults: Mapping[str, Any],
        device: str,
    ) -> None:
        self._variants = variants
        self._family = family
        self._options = options
        self._defaults = defaults
        self._device = device

    def __call__(self, identity: RequestIdentity, payload: StageData) -> StepRequestState:
        """Raises `InvalidRequestError`, or what the pipeline's own checks raise."""
        inputs = read_inputs(payload)
        self._check(inputs)
        pipeline = self._variants.base
        given = call_arguments(pipeline, inputs, self._options, self._defaults)
        self._family.refuse_unknown(list(given))
        signature = signature_of(type(pipeline))
        known = self._family.known_arguments
        arguments = {name: signature.default(name) for name in known if name in signature} | given
        state = StepRequestState(
            identity=identity,
            inputs=inputs,
            arguments=arguments,
            generator=make_generator(inputs.params, self._device),
        )
        if inputs.params.scheduler is not None or inputs.params.flow_shift is not None:
            state.extra["scheduler"] = request_scheduler(pipeline, inputs.params)
        self._family.check(state)
        return state

    def _check(self, inputs: DiffusionInputs) -> None:
        base = self._variants.base
        if self._variants.choose(inputs) is not base:
            raise UnsupportedCombinationError(
                f"step mode of {type(base).__name__} takes no pictures; start the server without "
                "--step-execution and --diffusion-streaming-output for that",
                param="image",
            )
        for name in _PER_STAGE:
            if getattr(inputs.params, name) is not None:
                raise InvalidRequestError(
                    f"{name} cannot be chosen by a request in step mode, where requests share the "
                    f"autoencoder; set the stage's option {name}",
                    param=name,
                )


def explain(error: Exception, state: StepRequestState | None) -> OmniError:
    """What an exception while preparing means for its request: the library's `ValueError`s are its
    checks of the inputs."""
    if state is None and isinstance(error, ValueError) and not isinstance(error, OmniError):
        return InvalidRequestError(f"the model refuses the request: {error}")
    return classify(error, state.inputs if state else None, 0)
