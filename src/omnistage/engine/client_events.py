"""From stages' messages to the events of a caller's stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from omnistage.config.resolved import OmniConfig
from omnistage.contracts.errors import ProtocolError
from omnistage.contracts.messages import Output, Progress
from omnistage.contracts.outputs import FinishReason, OmniProgress, OmniRequestOutput
from omnistage.engine.entry import Entry
from omnistage.engine.payments import Payments
from omnistage.engine.request_state import Child, RequestState
from omnistage.observability.metrics import EngineMetrics

Post = Callable[[Callable[[], None]], None]


class ClientEvents:
    """Used by the orchestrator's loop only. `post` brings a call back to it."""

    def __init__(
        self,
        config: OmniConfig,
        entry: Entry,
        payments: Payments,
        metrics: EngineMetrics,
        post: Post,
    ) -> None:
        self._config = config
        self._entry = entry
        self._payments = payments
        self._metrics = metrics
        self._post = post

    def output(
        self, state: RequestState, child: Child, message: Output, frames: Sequence[Any]
    ) -> None:
        """The bytes are mapped now, so that they outlive their producer; the credit of a partial
        output goes back when the caller takes the event, that of a preview at once: a slow reader
        holds up no denoising."""
        reason = _finish_reason(message) if message.final else None
        data = self._entry.receive(message.payload, frames, message.stage_id)
        child.meter.output(data, self._metrics, final=message.final)
        peak_memory_mb = data.fields.pop("peak_memory_mb", None)
        finished = state.is_complete()

        def taken() -> None:
            self._post(lambda: self._taken(state, child, message))

        state.finish_reason = reason or state.finish_reason
        event = OmniRequestOutput(
            request_id=state.request_id,
            prompt=state.request.prompt,
            stage_id=message.stage_id,
            replica_id=message.replica_id,
            child_index=child.identity.child_index,
            output_index=message.output_index,
            modality=data.modality,
            partial=not message.final,
            finished=finished,
            finish_reason=reason,
            tensors=data.tensors,
            fields=data.fields,
            stage_durations=dict(state.stage_durations) if finished else {},
            peak_memory_mb=peak_memory_mb,
        )
        paid_now = message.final or event.is_preview
        if paid_now:
            self._payments.pay(child, message.stage_id, message.sequence)
        state.stream.put(event, None if paid_now else taken)

    def progress(self, state: RequestState, child: Child, message: Progress) -> None:
        state.stream.put(
            OmniRequestOutput(
                request_id=state.request_id,
                stage_id=message.stage_id,
                replica_id=message.replica_id,
                child_index=child.identity.child_index,
                partial=True,
                progress=OmniProgress(
                    stage_id=message.stage_id,
                    step=message.step,
                    total_steps=message.total_steps,
                ),
            )
        )

    def terminal(self, state: RequestState) -> None:
        """The end of a request whose last output went to another stage than the caller's."""
        state.stream.put(
            OmniRequestOutput(
                request_id=state.request_id,
                prompt=state.request.prompt,
                finished=True,
                finish_reason=state.finish_reason,
                stage_durations=dict(state.stage_durations),
            )
        )

    def record_stage(self, state: RequestState, child: Child, message: Output) -> None:
        """One child is through one stage."""
        stage = self._config.stages[message.stage_id]
        seconds = time.monotonic() - child.visits[message.stage_id].started_at
        longest_s = max(seconds, state.stage_durations.get(stage.name, 0.0))
        state.stage_durations[stage.name] = longest_s
        steps = message.payload.fields.get("num_inference_steps")
        self._metrics.stage_finished(
            stage.name,
            message.replica_id,
            message.timings_s,
            steps if isinstance(steps, int) else None,
        )

    def _taken(self, state: RequestState, child: Child, message: Output) -> None:
        if state.active:
            self._payments.pay(child, message.stage_id, message.sequence)


def _finish_reason(message: Output) -> FinishReason:
    try:
        return FinishReason(message.finish_reason or FinishReason.STOP)
    except ValueError as error:
        raise ProtocolError(f"stage {message.stage_id} ended with {error}") from error
