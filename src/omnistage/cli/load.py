"""A fixed load on a server and what it took. Every answer is checked before its time counts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

from omnistage.cli.http_client import (
    GENERATIONS,
    error_message,
    generation_body,
    open_picture,
    read_pictures,
    unreachable,
)
from omnistage.contracts.errors import ConfigurationError, UnavailableError

PROMPTS = (
    "a small red circle above a blue square on a yellow background",
    "a large green triangle",
    "a white square below an orange circle on a black background",
    "two shapes: a purple circle left of a red triangle",
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """`requests` requests of `pictures` pictures each, `concurrency` at a time. The prompts rotate
    and request i has seed i, so that every run asks for the same."""

    model: str
    requests: int
    concurrency: int
    warmup: int = 0
    size: tuple[int, int] | None = None
    steps: int | None = None
    pictures: int = 1
    timeout_s: float = 600.0
    api_key: str | None = None

    def body(self, index: int) -> dict[str, Any]:
        return generation_body(
            PROMPTS[index % len(PROMPTS)],
            model=self.model,
            n=self.pictures,
            seed=index,
            size="{}x{}".format(*self.size) if self.size else None,
            num_inference_steps=self.steps,
        )

    def for_model(self, model: str) -> Load:
        return replace(self, model=model)

    def describe(self) -> str:
        size = "{}x{}".format(*self.size) if self.size else "the model's size"
        steps = f"{self.steps} steps" if self.steps else "the model's steps"
        return (
            f"{self.model}: {self.requests} requests, {self.concurrency} at a time, "
            f"{self.pictures} picture(s) each, {size}, {steps}, {self.warmup} warmup"
        )


@dataclass(kw_only=True)
class Measurement:
    """Latencies of the requests that succeeded, in seconds, and messages of those that did not."""

    elapsed_s: float = 0.0
    pictures: int = 0
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def pictures_per_s(self) -> float:
        return self.pictures / self.elapsed_s

    def latency_s(self, percent: int) -> float:
        """The nearest-rank percentile; NaN when nothing succeeded."""
        ordered = sorted(self.latencies_s)
        if not ordered:
            return float("nan")
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    def describe(self) -> str:
        text = (
            f"{self.pictures_per_s:.2f} pictures/s: {len(self.latencies_s)} requests in "
            f"{self.elapsed_s:.1f} s; p50 {self.latency_s(50):.3f} s, "
            f"p99 {self.latency_s(99):.3f} s"
        )
        if self.failures:
            text += f", {len(self.failures)} FAILED, the first: {self.failures[0]}"
        return text


async def measure(url: str, load: Load) -> Measurement:
    """Run the warmup, then the load. Raises `ConfigurationError` when nothing answers at `url`, and
    `UnavailableError` when no request succeeds."""
    import httpx

    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=load.concurrency)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=load.timeout_s, limits=limits, trust_env=False
    ) as client:
        try:
            for index in range(load.warmup):
                await client.post(GENERATIONS, json=load.body(index))
            result = await _run(client, load)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise unreachable(url, error) from error
    if not result.latencies_s:
        raise UnavailableError(f"no request succeeded; the first answer: {result.failures[0]}")
    return result


async def _run(client: Any, load: Load) -> Measurement:
    import httpx

    result = Measurement()
    waiting = iter(range(load.requests))

    async def work() -> None:
        for index in waiting:
            started = time.perf_counter()
            try:
                response = await client.post(GENERATIONS, json=load.body(index))
            except httpx.TimeoutException:
                result.failures.append(f"no answer within {load.timeout_s:g} s")
                continue
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
                result.failures.append(f"the connection broke: {type(error).__name__}")
                continue
            elapsed_s = time.perf_counter() - started
            if response.status_code != 200:
                result.failures.append(f"{response.status_code}: {error_message(response)}")
                continue
            result.pictures += _check(response, load)
            result.latencies_s.append(elapsed_s)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(load.concurrency)))
    result.elapsed_s = time.perf_counter() - started
    return result


def _check(response: Any, load: Load) -> int:
    pictures = [open_picture(data) for data in read_pictures(response)]
    if len(pictures) != load.pictures:
        raise UnavailableError(f"{load.pictures} pictures were asked for, {len(pictures)} came")
    for picture in pictures:
        if load.size is not None and picture.size != load.size:
            raise ConfigurationError(
                f"a picture of size {load.size} was asked for, one of {picture.size} came"
            )
    return len(pictures)
