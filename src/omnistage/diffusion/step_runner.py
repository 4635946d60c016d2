"""Carries out the commands of step mode on one rank, over the states of the requests it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import (
    InternalError,
    OmniError,
    RequestCancelledError,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, ExecutionContext
from omnistage.diffusion.active import DECODE, ENCODE, PREVIEW, STEP
from omnistage.diffusion.arguments import steps_of
from omnistage.diffusion.batching import pack
from omnistage.diffusion.family import StepFamily, StepRequestState
from omnistage.diffusion.late_pictures import PictureOutput
from omnistage.diffusion.step_encode import Outcomes, StepEncoder
from omnistage.diffusion.step_wave import StepWave, shape_of

if TYPE_CHECKING:
    import torch

    from omnistage.diffusion.wave_passes import Passes


class StepRunner:
    """What one request is to blame for is its own part of a command's result. What may be due to
    the batch fails the command: the scheduler tries its members again, fewer together."""

    def __init__(
        self,
        family: StepFamily,
        output: PictureOutput,
        encoder: StepEncoder,
        free_memory: Callable[[], None],
    ) -> None:
        self._family = family
        self._output = output
        self._encoder = encoder
        self._wave = StepWave(family, free_memory)
        self._states: dict[RequestKey, StepRequestState] = {}
        self._commands = {
            ENCODE: self._encode,
            STEP: self._step,
            PREVIEW: self._preview,
            DECODE: self._decode,
        }

    @property
    def num_states(self) -> int:
        return len(self._states)

    def knows(self, command: Command) -> bool:
        return command.name in self._commands

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        import torch

        cancelled = context.checkpoint()
        with torch.no_grad():
            return self._commands[command.name](command, context, cancelled)

    def take_together(self, passes: Passes) -> None:
        """From now on passes of the denoiser are made as `passes` says."""
        self._wave.passes = passes

    def spare_pass(self) -> None:
        """One pass of the denoiser that moves nobody."""
        import torch

        going = (one for one in self._states.values() if one.step_index < one.total_steps)
        state = next(going, None)
        if state is None:
            raise InternalError("no request is here that a spare pass could be made for")
        with torch.no_grad():
            self._family.pass_once(state)

    def release(self, key: RequestKey) -> None:
        if self._states.pop(key, None) is not None:
            self._family.forget_batches()
            self._wave.keep(map(shape_of, self._states.values()))

    def close(self) -> None:
        self._states.clear()
        self._family.forget_batches()
        self._output.close()

    # commands ---------------------------------------------------------------------------------

    def _encode(
        self, command: Command, context: ExecutionContext, cancelled: frozenset[RequestKey]
    ) -> StageData:
        """Parts: see `StepEncoder.encode`."""
        states, outcomes = self._encoder.encode(command, cancelled)
        self._states |= {state.identity.key: state for state in states}
        return _packed(command, outcomes)

    def _step(
        self, command: Command, context: ExecutionContext, cancelled: frozenset[RequestKey]
    ) -> StageData:
        """Field "steps": how many each request has behind it now.

        One that has gone further than the command expects is left alone: the command before this
        one failed after it had moved it.
        """
        states = [self._state(identity) for identity in command.identities]
        expected, keep = (command.data.fields[name] for name in ("steps", "keep_clean"))
        going = [state.identity.key not in cancelled for state in states]
        due = [
            (state, keep_clean)
            for state, step, keep_clean, goes in zip(states, expected, keep, going, strict=True)
            if goes and state.step_index == step
        ]
        self._output.wait_for_device()
        if due:
            self._wave.step(due)
        self._output.mark_device()
        for state, goes in zip(states, going, strict=True):
            if goes:
                context.progress(state.identity, state.step_index, state.total_steps)
        return StageData(
            modality=Modality.LATENT, fields={"steps": [state.step_index for state in states]}
        )

    def _preview(
        self, command: Command, context: ExecutionContext, cancelled: frozenset[RequestKey]
    ) -> StageData:
        """Pictures of the predicted clean latents, as partial outputs."""
        numbers = dict(zip(command.identities, command.data.fields["previewed"], strict=True))
        states = self._states_of(command, cancelled)
        latents = [_clean_latents(state) for state in states]
        outcomes: Outcomes = {}
        with self._output.beside(*latents):
            pictures = self._family.post_decode(states, latents) if states else []
            for state, picture in zip(states, pictures, strict=True):
                fields = {
                    "partial_image_index": numbers[state.identity],
                    "step": state.step_index,
                    "total_steps": state.total_steps,
                    "output_type": "pil",
                }
                outcomes[state.identity.key] = self._sent(context, state, picture, "pil", fields)
        for state in states:
            state.clean = None
        return _packed(command, outcomes)

    def _decode(
        self, command: Command, context: ExecutionContext, cancelled: frozenset[RequestKey]
    ) -> StageData:
        """The results. Fields and tensors as in request mode."""
        states = self._states_of(command, cancelled)
        started = time.perf_counter()
        outcomes: Outcomes = {}
        with self._output.beside(*(state.latents for state in states)):
            decoded = self._decoded([one for one in states if _output_type(one) != "latent"])
            for state in states:
                picture = decoded.get(state.identity.key, state.latents)
                fields = self._result_fields(state, started)
                outcomes[state.identity.key] = self._sent(
                    context, state, picture, _output_type(state), fields
                )
        return _packed(command, outcomes)

    def _decoded(self, states: Sequence[StepRequestState]) -> dict[RequestKey, torch.Tensor]:
        if not states:
            return {}
        pictures = self._family.post_decode(states, [state.latents for state in states])
        keys = [state.identity.key for state in states]
        return dict(zip(keys, pictures, strict=True))

    # helpers ----------------------------------------------------------------------------------

    def _sent(
        self,
        context: ExecutionContext,
        state: StepRequestState,
        picture: torch.Tensor,
        output_type: str,
        fields: dict[str, Any],
    ) -> StageData | OmniError:
        try:
            return self._output.send(context, state.identity, picture, output_type, fields)
        except InternalError as error:  # its numbers are not finite
            return error.with_traceback(None)

    def _state(self, identity: RequestIdentity) -> StepRequestState:
        state = self._states.get(identity.key)
        if state is None:
            raise InternalError(f"request {identity} was not encoded here, or is released")
        return state

    def _states_of(
        self, command: Command, cancelled: frozenset[RequestKey]
    ) -> list[StepRequestState]:
        return [self._state(one) for one in command.identities if one.key not in cancelled]

    def _result_fields(self, state: StepRequestState, started: float) -> dict[str, Any]:
        state.timings_s["exec"] = started - state.extra["started"]
        state.timings_s["postprocess"] = time.perf_counter() - started
        return {
            "seed": state.inputs.params.seed,
            "output_type": _output_type(state),
            "num_inference_steps": steps_of(state.arguments),
            "timings_s": dict(state.timings_s),
        }


def _packed(command: Command, outcomes: Outcomes) -> StageData:
    """All parts in the command's order; those without an outcome were cancelled."""
    cancelled = RequestCancelledError("the request was cancelled")
    return pack([outcomes.get(one.key, cancelled) for one in command.identities])


def _output_type(state: StepRequestState) -> str:
    return state.inputs.params.output_type or "pil"


def _clean_latents(state: StepRequestState) -> torch.Tensor:
    if state.clean is None:
        raise InternalError(f"request {state.identity} has no predicted clean latent to show")
    return state.clean
