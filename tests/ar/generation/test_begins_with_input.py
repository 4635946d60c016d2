"""Codecs whose streams depend on more than codes, and that are silent until the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from omnistage.contracts.errors import RequestCancelledError
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.runtime import StageRequest
from omnistage.contracts.sampling import OmniTokenSamplingParams
from tests.ar.generation.codecs import Driver, RunningSum, codes_data, generation_stage

NAME = "tests.ar.generation.test_begins_with_input:build_quiet_sum"
ONES = np.ones((30, 2), dtype=np.int64)


class QuietSum(RunningSum):
    """Its one sample is the sum of all codes and of what its stream began with."""

    def begin_with(self, key: Any, start: Any) -> Any:
        stream = self.begin(key)
        self.sums[stream.row] = start.fields["first"]
        return stream

    def decode(self, streams: Any, codes: Any, frames: Any) -> list[torch.Tensor]:
        waves = super().decode(streams, codes, frames)
        return [wave[:0] for wave in waves]

    def finish(self, stream: Any) -> torch.Tensor:
        return torch.tensor([self.sums[stream.row]])


def build_quiet_sum(stage: Any, device: str, max_streams: int, report: Any) -> QuietSum:
    return QuietSum(max_streams)


def heard(world: Driver, name: str, first: float) -> list[Any]:
    data = codes_data(ONES)
    data.fields["first"] = first
    identity = RequestIdentity(request_id=name)
    world.credits[identity.key] = world.window
    world.scheduler.set_credits(identity.key, world.window)
    world.scheduler.add(
        StageRequest(identity=identity, data=data, params=OmniTokenSamplingParams())
    )
    while world.step():
        pass
    return world.emissions[name]


@pytest.mark.invariant("AR-INV-126")
def test_a_long_call_ends_when_nobody_listens_any_more() -> None:
    world = Driver(generation_stage(options={"codec_model": NAME}))
    world.model.between = lambda: None
    calls = []

    def cancelled_meanwhile(batch: int) -> None:
        for _ in range(3):
            calls.append(batch)
            world.model.between()
            world.cancelled.add(("a", 0))

    world.model.fail = cancelled_meanwhile
    heard(world, "b", 1.0)
    assert world.emissions["b"][-1].error is None
    calls.clear()
    world.cancelled.clear()
    [only] = heard(world, "a", 1.0)
    assert isinstance(only.error, RequestCancelledError)
    assert len(calls) == 2


def test_a_stream_begins_with_its_requests_input_and_says_nothing_until_it_has_sound() -> None:
    world = Driver(generation_stage(options={"codec_model": NAME}))
    for name, first in (("a", 5.0), ("b", 7.0)):
        [only] = heard(world, name, first)
        assert only.final
        assert only.data is not None
        assert only.data.tensors["audio"].tolist() == [first + ONES.sum()]
        assert only.data.fields["num_samples_before"] == 0
    assert len(world.commands) > 2
    assert world.scheduler.counts() == (0, 0)
