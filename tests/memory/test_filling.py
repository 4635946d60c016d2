"""What belongs to streamed blocks goes to the host, all else to the device; nothing is read twice.

The device is "meta", which holds no values, so that one sees what went there.
"""

from __future__ import annotations

import dataclasses

import pytest

from omnistage.memory.filling import Filler
from omnistage.memory.host.preflight import block_of, block_sources
from omnistage.memory.host.weight_plan import ComponentWeights
from omnistage.memory.materialize import materialize, materialize_streamed
from omnistage.memory.offload.host import HostBacking
from omnistage.memory.plan import SourceKind
from omnistage.memory.planner import plan_module
from omnistage.memory.reading import TensorFiles
from tests.memory.comparing import module_differences
from tests.memory.test_planner import qwen3


@pytest.fixture
def folder(tmp_path):
    return qwen3(tmp_path / "experts", moe=True)


def moe_plan(folder, dtype="float32"):
    """Of a model whose experts are fused while it is loaded."""
    from transformers import Qwen3MoeForCausalLM

    plan = plan_module(Qwen3MoeForCausalLM, folder, dtype=dtype)
    assert any(source.kind is SourceKind.CONVERTED for source in plan.sources.values())
    return plan


def on_device(plan, device):
    sources = {
        name: dataclasses.replace(source, device=device) for name, source in plan.sources.items()
    }
    return dataclasses.replace(plan, device=device, sources=sources)


def placed(module, plan):
    """Names by where their tensors are, of those that were read."""
    kinds = (SourceKind.CHECKPOINT, SourceKind.CONVERTED)
    names = [name for name, source in plan.sources.items() if source.kind in kinds]
    state = module.state_dict()
    return {name: state[name].device.type for name in names}


def test_blocks_go_to_the_host_and_the_rest_to_the_device(folder):
    plan, streamed = on_device(moe_plan(folder), "meta"), ("model.layers.1",)
    module, counted = plan.skeleton.take(), []
    with TensorFiles() as files:
        filler = Filler(plan, module, files, counted.append, streamed)
        filler.fill(plan.sources)
        read = sum(counted)
        filler.fill(plan.sources)
    assert placed(module, plan) == {
        name: "cpu" if block_of(name, streamed) else "meta" for name in placed(module, plan)
    }
    assert sum(counted) == read
    assert read == sum(
        source.nbytes for name, source in plan.sources.items() if name in placed(module, plan)
    )


def test_a_block_is_read_alone_and_where_it_is_wanted(folder):
    plan = on_device(moe_plan(folder), "meta")
    module = plan.skeleton.take()
    with TensorFiles() as files:
        filler = Filler(plan, module, files, lambda nbytes: None, ("model.layers.1",))
        filler.fill(block_sources(plan, "model.layers.1"))
        assert set(placed(module, plan).values()) == {"cpu", "meta"}
        before = dict(module.named_parameters())
        filler.fill(block_sources(plan, "model.layers.0"), "cpu")
    for name, parameter in module.named_parameters():
        if name.startswith("model.layers.0."):
            assert parameter.device.type == "cpu"
        else:
            assert parameter is before[name]


@pytest.mark.invariant("HOST-INV-001")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_experts_stream_from_private_memory(folder, dtype):
    plan = moe_plan(folder, dtype)
    streaming = ComponentWeights(
        component="model",
        backing=HostBacking.PRIVATE,
        paths=("model.layers.0", "model.layers.1"),
        reason="",
    )
    module, weights = materialize_streamed(plan, streaming)
    assert module_differences(module, materialize(plan)) == []
    assert list(weights.blocks) == list(streaming.paths)
    names = {place.name for block in weights.blocks.values() for place in block.places}
    converted = {
        name
        for name, source in plan.sources.items()
        if source.kind is SourceKind.CONVERTED and block_of(name, streaming.paths)
    }
    assert converted
    assert converted <= names
    weights.close()
