"""Step mode's first command: from payloads to states that can take steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from omnistage.contracts.errors import OmniError, OutOfMemoryError, StageLostError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.diffusion.batching import unpack
from omnistage.diffusion.failures import no_schedule
from omnistage.diffusion.family import StepFamily, StepRequestState
from omnistage.diffusion.step_wave import shape_of

StateMaker = Callable[[RequestIdentity, StageData], StepRequestState]
Classifier = Callable[[Exception, StepRequestState | None], OmniError]
Outcomes = dict[RequestKey, StageData | OmniError]


class StepEncoder:
    """`make_state` reads a request's payload; `classify` says what an exception means for it."""

    def __init__(self, family: StepFamily, make_state: StateMaker, classify: Classifier) -> None:
        self._family = family
        self._make_state = make_state
        self._classify = classify

    def encode(
        self, command: Command, cancelled: frozenset[RequestKey]
    ) -> tuple[list[StepRequestState], Outcomes]:
        """The states that are ready to denoise, and what became of each request: an error, or the
        fields "total_steps", "batch_key" and "cost" (how many numbers one step computes)."""
        started = time.perf_counter()
        outcomes: Outcomes = {}
        states = []
        for identity, payload in zip(command.identities, unpack(command.data), strict=True):
            assert isinstance(payload, StageData)
            if identity.key in cancelled:
                continue
            try:
                states.append(self._make_state(identity, payload))
            except Exception as error:
                outcomes[identity.key] = self._own_failure(error, None)
        self._encode_prompts(states)
        for state in states:
            outcomes[state.identity.key] = self._prepared(state, started)
        ready = [one for one in states if isinstance(outcomes[one.identity.key], StageData)]
        return ready, outcomes

    def _encode_prompts(self, states: Sequence[StepRequestState]) -> None:
        """Alone, a request learns what the library has against it; several are tried apart."""
        if len(states) != 1:
            if states:
                self._family.prepare_encode(states)
            return
        try:
            self._family.prepare_encode(states)
        except Exception as error:
            failure = self._classify(error, states[0])
        else:
            return
        raise failure

    def _prepared(self, state: StepRequestState, started: float) -> StageData | OmniError:
        try:
            self._family.prepare(state)
        except Exception as error:
            return self._own_failure(error, state)
        if not bool(state.scheduler.sigmas.isfinite().all()):
            return no_schedule(state.scheduler)
        state.timings_s["preprocess"] = time.perf_counter() - started
        state.extra["started"] = time.perf_counter()
        rows = state.num_outputs * len(state.branches)
        return StageData(
            modality=Modality.LATENT,
            fields={
                "total_steps": state.total_steps,
                "batch_key": shape_of(state),
                "cost": rows * state.latents.shape[1:].numel(),
            },
        )

    def _own_failure(self, error: Exception, state: StepRequestState | None) -> OmniError:
        """Raises what is not the one request's: a shortage of memory, a lost device."""
        failure = self._classify(error, state)
        if isinstance(failure, OutOfMemoryError | StageLostError):
            raise failure from None
        return failure
