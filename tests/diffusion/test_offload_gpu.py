"""On a CUDA device: strategies change no bit there either, also of compiled and fused blocks."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

from tests.diffusion.crowd import Crowd
from tests.diffusion.reference import same_bits
from tests.diffusion.test_offload_parity import MODES, crowd, requests, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"
NO_GRAPHS = {"graph_max_tokens": 0}
"""A streaming denoiser replays none, and what a graph records may be other kernels."""


def on_the_device(mode: str, strategy: str, *, eager: bool, **changes):
    return settings(
        mode,
        strategy,
        devices=(DEVICE,),
        dtype="bfloat16",
        enforce_eager=eager,
        options=NO_GRAPHS,
        **changes,
    )


@functools.cache
def resident(family: str, mode: str, eager: bool, batch: int):
    with crowd(family, **on_the_device(mode, "none", eager=eager, batch=batch)) as stage:
        results = stage.run(requests(family, batch)).results
    return {name: torch.as_tensor(one.tensors["images"]) for name, one in results.items()}


CASES = [
    *[(family, mode, True, 1) for family in ("qwen_image", "flux", "sd35") for mode in MODES],
    ("qwen_image", "step", True, 4),
    ("qwen_image", "step", False, 1),
    ("flux", "request", False, 1),
]


@pytest.mark.parametrize("strategy", ["model", "layerwise"])
@pytest.mark.parametrize(("family", "mode", "eager", "batch"), CASES)
def test_pictures_are_the_same_to_the_bit(family, mode, eager, batch, strategy):
    expected = resident(family, mode, eager, batch)
    assert all(one.float().std() > 0.01 for one in expected.values())
    with crowd(family, **on_the_device(mode, strategy, eager=eager, batch=batch)) as stage:
        for _ in range(2):
            outcome = stage.run(requests(family, batch))
            assert outcome.errors == {}
            for name, picture in expected.items():
                assert same_bits(outcome.results[name].tensors["images"], picture), name
        described = stage.executor._fast_path.describe()
        assert stage.executor._offload.describe()["page_locked"]
    if not eager:
        assert described["fused_layers"] > 0
        assert sum(described["compilations"].values()) > 0


def growth_bytes(strategy: str) -> int:
    """Of what is allocated, by running and closing a stage once more."""
    kept = []
    for _ in range(3):
        stage = Crowd("qwen_image", **on_the_device("step", strategy, eager=True))
        stage.run(requests("qwen_image", 1))
        stage.executor.close()
        del stage
        gc.collect()
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated())
    return kept[-1] - kept[-2]


@pytest.mark.parametrize("strategy", ["model", "layerwise"])
def test_closing_gives_the_device_back(strategy):
    """A cached method of the library's rotary embedding keeps a table of every instance."""
    assert growth_bytes(strategy) <= growth_bytes("none")
