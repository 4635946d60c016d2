"""What the benchmark computes."""

from __future__ import annotations

import math

import pytest

from omnistage.cli.load import Load, Measurement

TEN = Measurement(elapsed_s=4.0, pictures=20, latencies_s=[float(i) for i in range(10, 0, -1)])


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 5), (90, 9), (91, 10), (99, 10)])
def test_percentiles_are_nearest_rank(percent: int, expected: float) -> None:
    assert TEN.latency_s(percent) == expected


def test_rates() -> None:
    assert TEN.pictures_per_s == 5.0
    assert math.isnan(Measurement().latency_s(50))
    failed = Measurement(elapsed_s=1.0, latencies_s=[1.0], failures=["503: full", "x"])
    assert "2 FAILED, the first: 503: full" in failed.describe()


def test_the_same_load_asks_for_the_same() -> None:
    load = Load(model="m", requests=8, concurrency=2, size=(64, 32), steps=3)
    bodies = [load.body(index) for index in range(8)]
    assert bodies == [load.body(index) for index in range(8)]
    assert bodies[0]["size"] == "64x32"
    assert bodies[0]["num_inference_steps"] == 3
    assert [body["seed"] for body in bodies] == list(range(8))
    assert bodies[0]["prompt"] == bodies[4]["prompt"] != bodies[1]["prompt"]
    other = load.for_model("other").body(0)
    assert other == bodies[0] | {"model": "other"}
    assert "size" not in Load(model="m", requests=1, concurrency=1).body(0)
