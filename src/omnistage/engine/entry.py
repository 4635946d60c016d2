"""The engine's own ends of the connectors: a request's inputs in, payloads for the caller out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnistage.config.pipeline import ENTRY
from omnistage.config.resolved import INLINE_PROCESS, OmniConfig
from omnistage.contracts.messages import InputConsumed
from omnistage.contracts.payloads import PayloadRef, StageData
from omnistage.engine.deliveries import Deliveries
from omnistage.engine.request_state import Child, Delivery, RequestState
from omnistage.transport.registry import make_connector


class Entry:
    """Used by the orchestrator's loop only."""

    def __init__(self, config: OmniConfig, deliveries: Deliveries) -> None:
        self._pipeline = config.pipeline
        self._deliveries = deliveries
        self._connectors = {
            stage.stage_id: make_connector(
                "inline" if stage.process == INLINE_PROCESS else stage.connector,
                shm_threshold_bytes=stage.shm_threshold_bytes,
            )
            for stage in config.stages
        }

    def send(
        self, state: RequestState, data: StageData | None, *, last: bool, epoch: int = 0
    ) -> None:
        """Send the next input, None for each child's own first one, to every entry stage needed.

        Raises `OmniError` when the data cannot travel or a stage is down.
        """
        sequence = state.next_input
        state.next_input += 1
        for child in state.children.values():
            for stage_id in self._stages(state):
                payload = child.inputs if data is None else data
                ref, frames = self._connectors[stage_id].send(payload)
                if ref.handle is not None:
                    child.entry_handles[stage_id, sequence] = ref.handle
                state.unread_inputs[sequence] = state.unread_inputs.get(sequence, 0) + 1
                delivery = Delivery(
                    stage_id=stage_id,
                    source_stage_id=None,
                    sequence=sequence,
                    payload=ref,
                    frames=tuple(frames),
                    last=last,
                    epoch=epoch,
                )
                self._deliveries.deliver(state, child, delivery)

    def end(self, state: RequestState, epoch: int) -> None:
        """The streamed input is complete without a further payload."""
        for child in state.children.values():
            for stage_id in self._stages(state):
                self._deliveries.end_entry(child, stage_id, epoch)

    def consumed(self, state: RequestState, child: Child, message: InputConsumed) -> None:
        """A stage has copied one input in; when all that read it have, its place is free."""
        self._release(child, (message.stage_id, message.sequence))
        left = state.unread_inputs.get(message.sequence, 0) - 1
        if left > 0:
            state.unread_inputs[message.sequence] = left
        elif state.unread_inputs.pop(message.sequence, None) is not None and message.sequence > 0:
            state.return_input_credit()

    def receive(self, ref: PayloadRef, frames: Sequence[Any], stage_id: int) -> StageData:
        """A stage's payload, mapped now, so that it outlives its producer."""
        return self._connectors[stage_id].receive(ref, frames)

    def forget(self, child: Child) -> None:
        """Free what the engine itself holds for this child."""
        for entry in list(child.entry_handles):
            self._release(child, entry)

    def outstanding(self) -> int:
        """Payloads that the engine itself holds in shared memory."""
        return sum(connector.outstanding() for connector in self._connectors.values())

    def close(self) -> None:
        for connector in self._connectors.values():
            connector.close()

    def _stages(self, state: RequestState) -> list[int]:
        readers = self._pipeline.consumers(ENTRY)
        return [stage.stage_id for stage in readers if stage.stage_id in state.needed]

    def _release(self, child: Child, entry: tuple[int, int]) -> None:
        handle = child.entry_handles.pop(entry, None)
        if handle is not None:
            self._connectors[entry[0]].release(handle)
