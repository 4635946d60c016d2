"""Previews: partial outputs that a later one replaces, from a stage to the caller."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.contracts.messages import Acknowledge, Output
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import PARTIAL_IMAGE_INDEX
from omnistage.contracts.payloads import StageData
from omnistage.engine.results import ResultCollector, materialize
from omnistage.transport.inline import InlineConnector
from tests.engine.fake_stages import FakeEngine
from tests.toy.deployment import counting, toy_config, toy_pipeline


@pytest.mark.invariant("ORCH-INV-107")
async def test_previews_cost_a_slow_reader_nothing() -> None:
    """They are paid at once, never fill its stream, and the newest wait for it."""
    engine = FakeEngine(toy_config(ranks=1, window=1, pipeline=toy_pipeline(both_final=True)))
    first, second = engine.stages.replicas
    state = engine.admit(counting(1))
    engine.turn()
    (child,) = first.children.values()
    for _ in range(20):
        assert child.can_emit
        first.preview(child)
        engine.deliver(first)
        engine.turn()
    assert second.children == {}, "a preview went to the next stage"
    assert state.slow_timer is None
    seen = [(await state.stream.get()).fields[PARTIAL_IMAGE_INDEX] for _ in range(3)]
    assert seen == [17, 18, 19]
    assert len(state.stream) == 0
    await engine.orchestrator.close()


@pytest.mark.invariant("ORCH-INV-101")
async def test_previews_become_pictures_and_are_no_part_of_the_result() -> None:
    engine = FakeEngine(toy_config(ranks=1, pipeline=toy_pipeline(both_final=True)))
    state = engine.admit(counting(1))
    engine.turn()
    (child,) = engine.stages.replicas[0].children.values()
    fields = {PARTIAL_IMAGE_INDEX: 0, "step": 2, "total_steps": 8}
    pictures = np.full((2, 4, 6, 3), 7, np.uint8)
    data = StageData(modality=Modality.IMAGE, fields=fields, tensors={"images": pictures})
    payload, frames = InlineConnector().send(data)
    output = Output(
        identity=child.identity,
        stage_id=0,
        replica_id=0,
        sequence=0,
        payload=payload,
        final=False,
    )
    child.unacknowledged.add(0)
    engine.orchestrator.stage_message(output, frames)
    engine.turn()
    assert [m.sequence for m in engine.stages.sent if isinstance(m, Acknowledge)] == [0]

    event = materialize(await state.stream.get())
    assert (event.partial, event.finished, event.is_preview) == (True, False, True)
    assert event.fields == fields
    assert [(p.size, p.getpixel((0, 0))) for p in event.images] == [((6, 4), (7, 7, 7))] * 2
    collector = ResultCollector("r", "a prompt")
    collector.add(event)
    assert collector.result().images == []
    await engine.orchestrator.close()
