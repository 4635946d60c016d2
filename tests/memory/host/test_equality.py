"""What is streamed has the bits that the library loads, wherever the host keeps it."""

from __future__ import annotations

import pytest
import torch

from omnistage.memory.host.layout import fill, shard_bytes, shard_of, view
from omnistage.memory.offload.host import ALIGNMENT_BYTES, HostBacking
from omnistage.memory.pipeline_loader import load_pipeline, plan_pipeline
from tests.checkpoints import checkpoint
from tests.memory.comparing import pipeline_differences
from tests.memory.host.placing import LISTS, blocks_of, streaming
from tests.memory.test_equality import reference


@pytest.mark.invariant("HOST-INV-001")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", LISTS)
def test_views_and_images_equal_the_library(family, dtype):
    path = checkpoint(family)
    plan = plan_pipeline(path, dtype=dtype)
    blocks = blocks_of(plan, family)
    loaded = load_pipeline(plan, placement=streaming(blocks))
    expected = reference(path, dtype)
    assert pipeline_differences(loaded.pipeline, expected) == []
    backing = HostBacking.CHECKPOINT if dtype == "float32" else HostBacking.PRIVATE
    assert set(loaded.host_weights) == set(blocks)
    for name, weights in loaded.host_weights.items():
        assert weights.backing is backing
        assert tuple(weights.blocks) == blocks[name]
        state = getattr(expected, name).state_dict()
        for block in weights.blocks.values():
            check_block(block, {key: state[key] for key in state if key.startswith(block.path)})
    loaded.close()


def check_block(block, state):
    assert {place.name for place in block.places} == {
        name for name in state if name.startswith(f"{block.path}.")
    }
    assert block.nbytes % ALIGNMENT_BYTES == 0
    image = torch.full((block.nbytes,), 0xFF, dtype=torch.uint8)
    for piece in block.pieces:
        image[piece.offset_bytes :][: piece.source.numel()] = piece.source
    count = 3
    gathered = torch.full((shard_bytes(block, count) * count,), 0xFF, dtype=torch.uint8)
    for index, share in enumerate(gathered.chunk(count)):
        fill(share, shard_of(block, index, count))
    gaps = torch.ones(gathered.numel(), dtype=torch.bool)
    for piece in block.pieces:
        gaps[piece.offset_bytes :][: piece.source.numel()] = False
    assert not gathered[gaps].any()
    for place in block.places:
        assert place.offset_bytes % ALIGNMENT_BYTES == 0
        assert place.offset_bytes + place.nbytes <= block.nbytes
        for whole in (image, gathered):
            assert torch.equal(view(whole, place), state[place.name]), place.name


@pytest.mark.invariant("HOST-INV-001")
@pytest.mark.parametrize("backing", [HostBacking.CHECKPOINT, HostBacking.PRIVATE])
def test_parameters_of_streamed_blocks_are_views_of_the_host_weights(backing):
    plan = plan_pipeline(checkpoint("flux"))
    blocks = blocks_of(plan, "flux")
    loaded = load_pipeline(plan, placement=streaming(blocks, backing))
    weights = loaded.host_weights["transformer"]
    memories = [(one.address, one.address + one.nbytes) for one in weights.memories]
    inside = {
        name
        for name, parameter in loaded.pipeline.transformer.named_parameters()
        if any(start <= parameter.data_ptr() < stop for start, stop in memories)
    }
    assert inside == {place.name for block in weights.blocks.values() for place in block.places}
    loaded.close()


@pytest.mark.invariant("HOST-INV-001")
def test_resident_blocks_are_loaded_as_ever():
    path = checkpoint("flux")
    plan = plan_pipeline(path)
    loaded = load_pipeline(
        plan,
        placement=streaming({"transformer": ("single_transformer_blocks.1",)}, swapped=["vae"]),
    )
    assert pipeline_differences(loaded.pipeline, reference(path, "float32")) == []
    assert list(loaded.host_weights["transformer"].blocks) == ["single_transformer_blocks.1"]
    assert "transformer: streamed from checkpoint" in loaded.reasons[0]
    loaded.close()
