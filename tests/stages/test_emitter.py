"""Sequence numbers, credits and memory of a replica's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from omnistage.contracts.errors import InvalidRequestError, OutOfMemoryError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.messages import Failed, Message, Output
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Emission
from omnistage.stages.emitter import Emitter
from omnistage.transport.registry import make_connector

ME = RequestIdentity(request_id="r")


class Bench:
    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.credits: list[int] = []
        self.connector = make_connector("auto", shm_threshold_bytes=16)
        self.emitter = Emitter(
            1, 2, self.connector, self._send, lambda key, credits: self.credits.append(credits)
        )
        self.emitter.open(ME, 2)

    def _send(self, message: Message, frames: Sequence[Any] = ()) -> None:
        self.sent.append(message)

    def emit(self, *, final: bool = False) -> bool:
        data = StageData(modality=Modality.AUDIO, tensors={"x": np.zeros(64, np.float32)})
        return self.emitter.emit(Emission(identity=ME, data=data, final=final))


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.connector.close()


@pytest.mark.invariant("STAGE-INV-207")
def test_outputs_are_numbered_and_cost_credits_until_acknowledged(bench: Bench) -> None:
    assert not bench.emit()
    assert not bench.emit()
    assert [m.sequence for m in bench.sent if isinstance(m, Output)] == [0, 1]
    assert all((m.stage_id, m.replica_id) == (1, 2) for m in bench.sent)
    assert bench.credits == [2, 1, 0]
    assert bench.connector.outstanding() == 2
    bench.emitter.acknowledge(ME.key, 0)
    bench.emitter.acknowledge(ME.key, 0)
    assert bench.credits == [2, 1, 0, 1]
    assert bench.connector.outstanding() == 1


@pytest.mark.invariant("STAGE-INV-207")
def test_a_child_is_forgotten_when_its_last_output_is_acknowledged(bench: Bench) -> None:
    bench.emit()
    assert bench.emit(final=True)
    assert not bench.emitter.is_open(ME.key)
    bench.emitter.acknowledge(ME.key, 1)
    assert bench.emitter.num_children == 1
    bench.emitter.acknowledge(ME.key, 0)
    assert bench.emitter.num_children == bench.connector.outstanding() == 0
    bench.emitter.acknowledge(ME.key, 0)
    with pytest.raises(KeyError):
        bench.emit()


def test_forgetting_and_failing_free_everything(bench: Bench) -> None:
    bench.emit()
    bench.emitter.forget(ME.key)
    bench.emitter.forget(ME.key)
    assert bench.connector.outstanding() == 0
    bench.emitter.open(ME, 2)
    bench.emit()
    assert bench.emitter.emit(Emission(identity=ME, error=OutOfMemoryError("no")))
    assert isinstance(bench.sent[-1], Failed)
    assert bench.emitter.num_children == bench.connector.outstanding() == 0


@pytest.mark.invariant("STAGE-INV-206")
def test_what_cannot_travel_leaves_the_child_open(bench: Bench) -> None:
    data = StageData(modality=Modality.AUDIO, fields={"x": object()})
    with pytest.raises(InvalidRequestError):
        bench.emitter.emit(Emission(identity=ME, data=data, final=True))
    assert bench.emitter.is_open(ME.key)
    assert bench.emit(final=True)
    assert [m.sequence for m in bench.sent if isinstance(m, Output)] == [0]
