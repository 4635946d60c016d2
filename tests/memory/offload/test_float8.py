"""Float8 blocks stream as any others, in half the bytes."""

from __future__ import annotations

import shutil

import pytest
import torch

from omnistage.memory.host.modules import layout_of
from omnistage.memory.materialize import materialize
from omnistage.memory.offload.discovery import streamable_blocks
from omnistage.memory.offload.factory import make_backend
from omnistage.memory.offload.host import HostBacking
from omnistage.memory.pipeline_loader import load_pipeline
from omnistage.memory.pipeline_plan import plan_pipeline
from omnistage.quantization.config import resolve_quantization
from omnistage.quantization.convert import convert_module, make_transforms, quantized_layers
from tests.checkpoints.store import checkpoint
from tests.memory.offload.models import MODELS, Pipeline, built, placed, run
from tests.memory.test_float8_layers import quantized_module, store
from tests.quantization.test_convert import call


def float8(name, compute, dtype=torch.float32):
    module = built(name).to(dtype)
    config = {"method": "fp8", "compute": compute}
    convert_module(module, resolve_quantization(config), "transformer")
    return module


@pytest.mark.invariant("QUANT-INV-007")
@pytest.mark.parametrize("compute", ["bf16", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_streamed_equals_resident_bit_for_bit(platform, name, compute):
    module = float8(name, compute)
    expected = run(module, name)
    full = run(built(name), name)
    assert quantized_layers(module)
    assert not torch.equal(expected, full)
    count = len(streamable_blocks(module))
    for residents in ((), tuple(range(0, count, 2))):
        backend = make_backend(placed(module, residents), {}, platform, "cpu")
        pipeline = Pipeline(transformer=module)
        backend.enable(pipeline)
        try:
            with platform.watching_reads():
                assert torch.equal(run(module, name), expected), residents
        finally:
            backend.disable()
    assert platform.uploads > 0
    assert platform.overtaken == 0
    assert torch.equal(run(module, name), expected)


@pytest.mark.invariant("QUANT-INV-007")
def test_images_of_blocks_take_little_more_than_half():
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        wide = QwenImageTransformer2DModel(num_layers=1).to(torch.bfloat16)
    path = "transformer_blocks.0"
    before = layout_of(wide, path).nbytes
    modulation = sum(
        tensor.nbytes
        for name, tensor in wide.transformer_blocks[0].named_parameters()
        if "_mod." in name
    )
    convert_module(wide, resolve_quantization("fp8"), "transformer")
    after = layout_of(wide, path).nbytes
    assert after - modulation < 0.51 * (before - modulation)


@pytest.mark.invariant("QUANT-INV-007")
def test_a_streamed_load_with_conversion_equals_a_resident_one_converted_afterwards(platform):
    plan = plan_pipeline(checkpoint("qwen_image"), dtype="bfloat16")
    quantization = resolve_quantization("fp8")
    skeletons = {name: part.skeleton.look() for name, part in plan.modules.items()}
    transforms = make_transforms(quantization, skeletons, device="cpu", float8=False)
    expected = materialize(plan.modules["transformer"])
    convert_module(expected, quantization, "transformer")
    placement = placed(skeletons["transformer"])
    loaded = load_pipeline(plan, placement=placement, transforms=transforms)
    try:
        found = loaded.pipeline.transformer.state_dict()
        assert set(found) == set(expected.state_dict())
        for name, tensor in expected.state_dict().items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
        streamed = loaded.host_weights["transformer"].blocks["transformer_blocks.0"]
        assert {place.dtype for place in streamed.places} >= {"float8_e4m3fn", "float32"}
    finally:
        loaded.close()


@pytest.mark.invariant("QUANT-INV-007")
def test_a_stored_float8_checkpoint_streams_from_its_own_files(platform, tmp_path):
    shutil.copytree(checkpoint("qwen_image"), tmp_path / "p")
    module = quantized_module()
    store(tmp_path / "p" / "transformer", module, {"quant_method": "fp8"})
    plan = plan_pipeline(tmp_path / "p", dtype="bfloat16")
    placement = placed(plan.modules["transformer"].skeleton.look())
    loaded = load_pipeline(plan, placement=placement)
    weights = loaded.host_weights["transformer"]
    assert weights.backing is HostBacking.CHECKPOINT
    backend = make_backend(placement, loaded.host_weights, platform, "cpu")
    backend.enable(loaded.pipeline)
    try:
        with platform.watching_reads():
            assert torch.equal(
                call(loaded.pipeline.transformer, torch.bfloat16), call(module, torch.bfloat16)
            )
    finally:
        backend.disable()
    assert platform.uploads > 0
    assert platform.overtaken == 0
