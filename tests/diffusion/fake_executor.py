"""Answers the commands of step mode without a model, and checks what every wave must keep."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from omnistage.contracts.errors import InvalidRequestError, OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.diffusion.batching import pack, unpack

COST_UNIT_PX = 16
REFUSED = "refuse me"


@dataclass
class FakeState:
    """A request of height 16 c has the shape "16 c", and each of its steps costs c."""

    shape: str
    total: int
    step: int = 0
    has_clean: bool = False


@dataclass
class FakeExecutor:
    """`late` outputs wait in `pending` to be delivered."""

    max_num_seqs: int
    late: bool = False
    states: dict[RequestKey, FakeState] = field(default_factory=dict)
    pending: list[tuple[RequestIdentity, StageData]] = field(default_factory=list)
    waves: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def execute(self, command: Command) -> StageData:
        assert 1 <= len(command.identities) <= self.max_num_seqs
        assert len(set(command.identities)) == len(command.identities)
        self.waves.append((command.name, tuple(one.request_id for one in command.identities)))
        if command.name != "encode":
            shapes = {self.states[one.key].shape for one in command.identities}
            assert len(shapes) == 1, f"{command.name} mixes {shapes}"
        result: StageData = getattr(self, f"_{command.name}")(command)
        return result

    def release(self, key: RequestKey) -> None:
        self.states.pop(key, None)
        self.pending = [one for one in self.pending if one[0].key != key]

    def fail_halfway(self, command: Command, moved: Collection[int]) -> None:
        """The members at `moved` take their step, then the command fails."""
        if command.name == "step":
            for index in moved:
                if index < len(command.identities):
                    self._move(command, index)

    def _encode(self, command: Command) -> StageData:
        parts: list[StageData | OmniError] = []
        for identity, payload in zip(command.identities, unpack(command.data), strict=True):
            params = payload.fields["params"]
            if payload.fields["prompt"] == REFUSED:
                parts.append(InvalidRequestError("no"))
                continue
            state = FakeState(str(params["height"]), params["num_inference_steps"])
            self.states[identity.key] = state
            cost = params["height"] // COST_UNIT_PX
            parts.append(
                _data(batch_key=state.shape, cost=cost, total_steps=state.total),
            )
        return pack(parts)

    def _step(self, command: Command) -> StageData:
        for index in range(len(command.identities)):
            self._move(command, index)
        return _data(steps=[self.states[one.key].step for one in command.identities])

    def _move(self, command: Command, index: int) -> None:
        state = self.states[command.identities[index].key]
        if state.step == command.data.fields["steps"][index]:
            assert state.step < state.total, "a step too many"
            state.step += 1
            state.has_clean = command.data.fields["keep_clean"][index]

    def _preview(self, command: Command) -> StageData:
        parts = []
        numbers = command.data.fields["previewed"]
        for identity, number in zip(command.identities, numbers, strict=True):
            state = self.states[identity.key]
            assert state.has_clean, "there is nothing to show"
            state.has_clean = False
            parts.append(
                self._output(
                    identity, partial_image_index=number, step=state.step, total_steps=state.total
                )
            )
        return pack(parts)

    def _decode(self, command: Command) -> StageData:
        parts = []
        for identity in command.identities:
            state = self.states[identity.key]
            assert state.step == state.total, "it has not taken all its steps"
            parts.append(self._output(identity, timings_s={}))
        return pack(parts)

    def _output(self, identity: RequestIdentity, **fields: Any) -> StageData:
        if not self.late:
            return _data(**fields)
        self.pending.append((identity, _data(**fields)))
        return _data(late=True)


def _data(**fields: Any) -> StageData:
    return StageData(modality=Modality.IMAGE, fields=fields)
