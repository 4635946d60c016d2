"""What the benchmark computes."""

from __future__ import annotations

import asyncio
import math

import pytest

from omnistage.cli.load import Load, Measurement, measure
from omnistage.contracts.errors import ConfigurationError, UnavailableError

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


@pytest.mark.parametrize(
    ("warmup", "error", "words"),
    [
        (0, UnavailableError, "the connection broke: RemoteProtocolError"),
        (1, ConfigurationError, r"no server answers at .* \(RemoteProtocolError\)"),
    ],
)
async def test_a_server_that_breaks_off_is_said_in_words(
    warmup: int, error: type[Exception], words: str
) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.close()

    load = Load(model="m", requests=2, concurrency=1, warmup=warmup, timeout_s=30)
    async with await asyncio.start_server(break_off, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(error, match=words):
            await measure(f"http://{host}:{port}", load)
