"""What the metrics say of texts and sounds, by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omnistage.contracts.messages import Output
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.tensors import host_tensor
from omnistage.engine.output_meter import OutputMeter
from omnistage.observability.metrics import EngineMetrics
from omnistage.transport.inline import InlineConnector
from tests.engine.fake_stages import FakeChild, FakeEngine
from tests.toy.deployment import counting, toy_config, toy_pipeline

RATE_HZ = 1000


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.metrics = EngineMetrics("m")
        self.meter = OutputMeter(100.0, lambda: self.now_s)

    def text(self, at_s: float, tokens: int, *, final: bool = False) -> None:
        fields = {"completion_tokens": tokens, "prompt_tokens": 20, "cached_tokens": 16}
        self._output(at_s, StageData(modality=Modality.TEXT, fields=fields), final)

    def sound(self, at_s: float, samples: int, *, final: bool = False) -> None:
        tensors = {"audio": host_tensor(np.zeros(samples, np.float32))} if samples else {}
        fields = {"sample_rate": RATE_HZ}
        data = StageData(modality=Modality.AUDIO, fields=fields, tensors=tensors)
        self._output(at_s, data, final)

    def _output(self, at_s: float, data: StageData, final: bool) -> None:
        self.now_s = 100.0 + at_s
        self.meter.output(data, self.metrics, final=final)

    def value(self, name: str) -> Any:
        name = f"omnistage_{name}"
        return self.metrics.registry.get_sample_value(name, {"model_name": "m"})


@pytest.mark.invariant("OBS-INV-002")
def test_text_has_a_first_token_and_a_pace_behind_it() -> None:
    world = World()
    world.text(0.5, 2)
    world.text(0.9, 4)
    world.text(1.5, 7, final=True)
    assert world.value("time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert world.value("time_per_output_token_seconds_sum") == pytest.approx(1.0 / 5)
    assert world.value("generation_tokens_total") == 7
    assert world.value("prompt_tokens_total") == 20
    assert world.value("prompt_tokens_cached_total") == 16


def test_text_in_one_piece_has_neither() -> None:
    world = World()
    world.text(1.5, 7, final=True)
    assert world.value("time_to_first_token_seconds_count") == 0
    assert world.value("time_per_output_token_seconds_count") == 0
    assert world.value("generation_tokens_total") == 7


@pytest.mark.invariant("OBS-INV-002")
def test_sound_has_a_first_packet_a_factor_and_gaps() -> None:
    world = World()
    world.sound(0.2, 1000)
    world.sound(0.4, 1000)
    world.sound(2.7, 1000)
    world.sound(3.0, 0, final=True)
    assert world.value("audio_time_to_first_packet_seconds_sum") == pytest.approx(0.2)
    assert world.value("audio_duration_seconds_sum") == pytest.approx(3.0)
    assert world.value("audio_real_time_ratio_sum") == pytest.approx(1.0)
    assert world.value("audio_underrun_seconds_sum") == pytest.approx(0.5)


def test_sound_in_one_piece_has_no_gaps_and_silence_nothing() -> None:
    world = World()
    world.sound(0.5, 1000, final=True)
    assert world.value("audio_real_time_ratio_sum") == pytest.approx(0.5)
    assert world.value("audio_underrun_seconds_count") == 0
    empty = World()
    empty.sound(0.5, 0, final=True)
    assert empty.value("audio_time_to_first_packet_seconds_count") == 0
    assert empty.value("audio_duration_seconds_count") == 0


@pytest.mark.invariant("OBS-INV-002")
async def test_what_stages_send_to_the_caller_is_measured() -> None:
    """From a stage's message, through the orchestrator, to the engine's own metrics."""
    engine = FakeEngine(toy_config(ranks=1, pipeline=toy_pipeline(both_final=True)))
    metrics = engine.orchestrator._events._metrics
    engine.admit(counting(1))
    engine.turn()
    (child,) = engine.stages.replicas[0].children.values()
    for sequence, tokens in enumerate((1, 4)):
        data = StageData(modality=Modality.TEXT, fields={"completion_tokens": tokens})
        _send(engine, child, data, sequence, final=tokens == 4)
    engine.turn()
    registry, labels = metrics.registry, {"model_name": "fake"}
    for name, wanted in (
        ("omnistage_time_to_first_token_seconds_count", 1),
        ("omnistage_time_per_output_token_seconds_count", 1),
        ("omnistage_generation_tokens_total", 4),
    ):
        assert registry.get_sample_value(name, labels) == wanted, name
    await engine.orchestrator.close()


def _send(
    engine: FakeEngine, child: FakeChild, data: StageData, sequence: int, *, final: bool
) -> None:
    payload, frames = InlineConnector().send(data)
    output = Output(
        identity=child.identity,
        stage_id=0,
        replica_id=0,
        sequence=sequence,
        payload=payload,
        final=final,
    )
    child.unacknowledged.add(sequence)
    engine.orchestrator.stage_message(output, frames)
