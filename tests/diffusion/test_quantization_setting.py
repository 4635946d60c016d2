"""`quantization_config` reaches the loaded pipeline, resident, swapped and streamed alike."""

from __future__ import annotations

import pytest
import torch

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.diffusion.runtime import DiffusionRuntime
from omnistage.quantization.convert import quantized_layers
from tests.checkpoints import checkpoint
from tests.diffusion.crowd import Crowd
from tests.diffusion.driver import diffusion_stage
from tests.diffusion.reference import same_bits
from tests.diffusion.test_offload_parity import requests, settings
from tests.memory.offload.fake_device import late_device


def picture(platform, strategy: str, config, cache) -> tuple[torch.Tensor, str | None]:
    """And where the host keeps what is streamed."""
    changes = {"quantization_config": config, "weight_cache_dir": str(cache)}
    stage = Crowd("qwen_image", **settings("step", strategy, **changes))
    try:
        transformer = stage.executor._variants.base.transformer
        assert bool(quantized_layers(transformer)) == (config is not None)
        with platform.watching_reads():
            outcome = stage.run(requests("qwen_image", 1))
        placed = stage.executor._offload.describe().get("components", {}).get("transformer", {})
    finally:
        stage.executor.close()
    return torch.as_tensor(outcome.results["r0"].tensors["images"]), placed.get("host")


@pytest.mark.invariant("DIFF-RUNTIME-INV-070")
def test_float8_layers_are_the_same_wherever_they_wait(tmp_path):
    with late_device() as platform:
        full, _ = picture(platform, "none", None, tmp_path)
        resident, _ = picture(platform, "none", "fp8", tmp_path)
        assert resident.std() > 0.05
        assert 0 < (full - resident).abs().max() < 0.5
        backings = []
        for strategy in ("model", "layerwise", "layerwise"):
            found, backing = picture(platform, strategy, "fp8", tmp_path)
            assert same_bits(found, resident), strategy
            backings.append(backing)
        assert backings == [None, "runtime_cache", "runtime_cache"]
        assert platform.overtaken == 0
        assert platform.locked == {}


def test_the_replica_says_which_layers_are_float8():
    stage = diffusion_stage(
        checkpoint("qwen_image"), quantization_config={"method": "fp8", "compute": "bf16"}
    )
    executor = DiffusionRuntime.executor(stage, 0, 1)
    try:
        described = executor.load(lambda note, fraction: None)["quantization"]
    finally:
        executor.close()
    assert described.keys() == {"transformer"}
    assert described["transformer"]["layers"] > 0


@pytest.mark.parametrize(
    ("config", "error"),
    [("fp9", ConfigurationError), ("nvfp4", UnsupportedCombinationError), ({}, ConfigurationError)],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(config, error):
    with pytest.raises(error, match="quantization"):
        DiffusionRuntime.scheduler(diffusion_stage("nowhere", quantization_config=config))
