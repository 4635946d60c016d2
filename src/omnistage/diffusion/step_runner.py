"""Carries out the commands of step mode on one rank, over the states of the requests it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import (
    ConfigurationError,
    InternalError,
    InvalidRequestError,
    OmniError,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, ExecutionContext
from omnistage.diffusion.batching import pack, unpack
from omnistage.diffusion.family import StepFamily, StepRequestState
from omnistage.diffusion.late_pictures import PictureOutput
from omnistage.diffusion.step_scheduler import DECODE, ENCODE, PREVIEW, STEP
from omnistage.diffusion.warm_up import SilentContext, warm_up_request

if TYPE_CHECKING:
    import torch

StateMaker = Callable[[RequestIdentity, StageData], StepRequestState]
Classifier = Callable[[Exception, StepRequestState | None], OmniError]


class StepRunner:
    """`make_state` reads a request's payload; `classify` says what an exception means for it."""

    def __init__(
        self,
        family: StepFamily,
        output: PictureOutput,
        make_state: StateMaker,
        classify: Classifier,
    ) -> None:
        self._family = family
        self._output = output
        self._make_state = make_state
        self._classify = classify
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

    def release(self, key: RequestKey) -> None:
        if self._states.pop(key, None) is not None:
            self._family.forget_batches()

    def warm_up(self, height: int, width: int) -> None:
        """Run one request of that size without output, as far as its second step."""
        context = SilentContext()
        request = warm_up_request(height, width)
        encode = Command(name=ENCODE, kind=ENCODE, **request)
        try:
            (answer,) = unpack(self.execute(encode, context))
            if isinstance(answer, OmniError):
                raise ConfigurationError(f"warm-up at {width}x{height}: {answer.message}")
            for step in range(2):
                fields = {"steps": [step], "keep_clean": [False], "previewed": [0]}
                data = StageData(modality=Modality.LATENT, fields=fields)
                identities = request["identities"]
                command = Command(name=STEP, kind=STEP, identities=identities, data=data)
                self.execute(command, context)
        finally:
            for identity in request["identities"]:
                self.release(identity.key)

    def close(self) -> None:
        self._states.clear()
        self._family.forget_batches()
        self._output.close()

    # commands ---------------------------------------------------------------------------------

    def _encode(
        self, command: Command, context: ExecutionContext, cancelled: frozenset[RequestKey]
    ) -> StageData:
        """Fields of each part: "total_steps", "batch_key", "cost" (tokens times branches)."""
        started = time.perf_counter()
        outcomes: dict[RequestKey, StageData | OmniError] = {}
        states = []
        for identity, payload in zip(command.identities, unpack(command.data), strict=True):
            assert isinstance(payload, StageData)
            if identity.key in cancelled:
                outcomes[identity.key] = InternalError("cancelled before it was encoded")
                continue
            try:
                states.append(self._make_state(identity, payload))
            except Exception as error:
                outcomes[identity.key] = self._classify(error, None)
        if states:
            self._family.prepare_encode(states)
        for state in states:
            outcomes[state.identity.key] = self._prepared(state, started)
        return pack([outcomes[identity.key] for identity in command.identities])

    def _prepared(self, state: StepRequestState, started: float) -> StageData | OmniError:
        try:
            self._family.prepare(state)
        except Exception as error:
            return self._classify(error, state)
        if not bool(state.scheduler.sigmas.isfinite().all()):
            return InvalidRequestError(
                f"num_inference_steps: the model's {type(state.scheduler).__name__} has no "
                f"schedule of {state.total_steps} step(s); ask for more",
                param="num_inference_steps",
            )
        state.timings_s["preprocess"] = time.perf_counter() - started
        state.extra["started"] = time.perf_counter()
        self._states[state.identity.key] = state
        rows = state.num_outputs * len(state.branches)
        return StageData(
            modality=Modality.LATENT,
            fields={
                "total_steps": state.total_steps,
                "batch_key": repr((state.latents.shape[1:], state.forward_key)),
                "cost": rows * state.latents.shape[1:].numel(),
            },
        )

    def _step(
        self, command: Command, context: ExecutionContext, cancelled: frozenset[RequestKey]
    ) -> StageData:
        """Field "steps": how many each request has behind it now.

        One that has gone further than the command expects is left alone: the command before this
        one failed after it had moved it.
        """
        states = [self._state(identity) for identity in command.identities]
        expected = command.data.fields["steps"]
        keep = command.data.fields["keep_clean"]
        due = [
            (state, keep_clean)
            for state, step, keep_clean in zip(states, expected, keep, strict=True)
            if state.step_index == step and state.identity.key not in cancelled
        ]
        self._output.wait_for_device()
        if due:
            predictions = self._family.denoise_step([state for state, _ in due])
            for (state, keep_clean), prediction in zip(due, predictions, strict=True):
                clean = self._family.predict_clean(state, prediction) if keep_clean else None
                state.clean = clean
                self._family.step_scheduler(state, prediction)
        self._output.mark_device()
        for state, _ in due:
            context.progress(state.identity, state.step_index, state.total_steps)
        return StageData(
            modality=Modality.LATENT, fields={"steps": [state.step_index for state in states]}
        )

    def _preview(
        self, command: Command, context: ExecutionContext, cancelled: frozenset[RequestKey]
    ) -> StageData:
        """Pictures of the predicted clean latents, as partial outputs."""
        states = [self._state(identity) for identity in command.identities]
        latents = [_clean_latents(state) for state in states]
        numbers = command.data.fields["previewed"]
        parts = []
        with self._output.beside(*latents):
            pictures = self._family.post_decode(states, latents)
            for state, picture, number in zip(states, pictures, numbers, strict=True):
                fields = {
                    "partial_image_index": number,
                    "step": state.step_index,
                    "total_steps": state.total_steps,
                    "output_type": "pil",
                }
                state.clean = None
                parts.append(self._output.send(context, state.identity, picture, "pil", fields))
        return pack(parts)

    def _decode(
        self, command: Command, context: ExecutionContext, cancelled: frozenset[RequestKey]
    ) -> StageData:
        """The results. Fields and tensors as in request mode."""
        states = [self._state(identity) for identity in command.identities]
        started = time.perf_counter()
        with self._output.beside(*(state.latents for state in states)):
            decoded = self._decoded([one for one in states if _output_type(one) != "latent"])
            parts = [
                self._output.send(
                    context,
                    state.identity,
                    decoded.get(state.identity.key, state.latents),
                    _output_type(state),
                    self._result_fields(state, started),
                )
                for state in states
            ]
        return pack(parts)

    def _decoded(self, states: Sequence[StepRequestState]) -> dict[RequestKey, torch.Tensor]:
        if not states:
            return {}
        pictures = self._family.post_decode(states, [state.latents for state in states])
        keys = [state.identity.key for state in states]
        return dict(zip(keys, pictures, strict=True))

    # helpers ----------------------------------------------------------------------------------

    def _state(self, identity: RequestIdentity) -> StepRequestState:
        state = self._states.get(identity.key)
        if state is None:
            raise InternalError(f"request {identity} was not encoded here, or is released")
        return state

    def _result_fields(self, state: StepRequestState, started: float) -> dict[str, Any]:
        state.timings_s["exec"] = started - state.extra["started"]
        state.timings_s["postprocess"] = time.perf_counter() - started
        return {
            "seed": state.inputs.params.seed,
            "output_type": _output_type(state),
            "num_inference_steps": state.arguments["num_inference_steps"],
            "timings_s": dict(state.timings_s),
        }


def _output_type(state: StepRequestState) -> str:
    return state.inputs.params.output_type or "pil"


def _clean_latents(state: StepRequestState) -> torch.Tensor:
    if state.clean is None:
        raise InternalError(f"request {state.identity} has no predicted clean latent to show")
    return state.clean
