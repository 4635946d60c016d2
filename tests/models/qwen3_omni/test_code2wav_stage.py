"""The codec stage, hosted, on a tiny checkpoint: what arrives is transformers' one-pass decode."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from omnistage.contracts.outputs import OmniRequestOutput
from omnistage.engine.async_omni import AsyncOmni
from tests.checkpoints import checkpoint
from tests.models.qwen3_omni.codec_stage import codec_config, codes_of
from tests.toy.deployment import counting
from tests.toy.leaks import assert_idle, nothing_left

NAME = "qwen3-omni"


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint(NAME))
    return model.code2wav.eval().requires_grad_(False)


def wanted(code2wav: torch.nn.Module, frames: int, start: int) -> np.ndarray:
    codes = torch.from_numpy(codes_of(np.arange(start, start + frames)))
    return code2wav(codes.T[None])[0, 0].numpy()


async def collect(engine: AsyncOmni, frames: int, start: int) -> list[OmniRequestOutput]:
    events = engine.generate(counting(frames, start=start))
    return [event async for event in events if "audio" in event.tensors]


def joined(events: list[OmniRequestOutput]) -> np.ndarray:
    return np.concatenate([event.tensors["audio"] for event in events])


@pytest.mark.invariant("AR-INV-120")
@pytest.mark.parametrize("process", ["inline", "both"])
async def test_streams_through_the_stage_are_the_one_pass_decode(reference, process):
    lengths = (1, 3, 4, 29, 60, 61)
    with nothing_left():
        async with AsyncOmni(config=codec_config(checkpoint(NAME), process=process)) as engine:
            runs = [collect(engine, n, start=100 * n) for n in lengths]
            for frames, events in zip(lengths, await asyncio.gather(*runs), strict=True):
                expected = wanted(reference, frames, start=100 * frames)
                assert np.sqrt(np.mean(expected**2)) >= 0.05
                error = np.abs(joined(events) - expected).max() / np.abs(expected).max()
                assert error <= 1e-5
                assert events[-1].finished
                assert len(events) >= 1 + (frames > 4) + (frames > 29)
            await assert_idle(engine)


@pytest.mark.invariant("AR-INV-128")
async def test_without_async_chunk_one_pass_gives_one_output(reference):
    config = codec_config(checkpoint(NAME), async_chunk=False)
    async with AsyncOmni(config=config) as engine:
        (event,) = await collect(engine, 60, start=0)
        expected = wanted(reference, 60, start=0)
        assert np.abs(joined([event]) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.invariant("AR-INV-126")
async def test_leaving_in_the_middle_frees_the_stream():
    async with AsyncOmni(config=codec_config(checkpoint(NAME))) as engine:
        events = engine.generate(counting(100_000))
        async for event in events:
            if "audio" in event.tensors:
                break
        await events.aclose()
        await assert_idle(engine)
