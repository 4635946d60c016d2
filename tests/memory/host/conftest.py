from __future__ import annotations

import pytest

from omnistage.memory.planner import plan_module
from tests.memory.offload.fake_device import late_device


@pytest.fixture
def device():
    with late_device() as platform:
        yield platform


@pytest.fixture(scope="session")
def aligned_folders(tmp_path_factory):
    """A Flux transformer whose tensors all take a multiple of 256 bytes, as those of large models:
    in one file, and in shards that blocks cross."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=3,
        num_single_layers=2,
        attention_head_dim=64,
        num_attention_heads=1,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(16, 24, 24),
    )
    whole, sharded = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("sharded")
    model.save_pretrained(whole)
    model.save_pretrained(sharded, max_shard_size="400KB")
    return whole, sharded


@pytest.fixture(scope="session")
def aligned_plans(aligned_folders):
    from diffusers import FluxTransformer2DModel

    return tuple(plan_module(FluxTransformer2DModel, folder) for folder in aligned_folders)


BLOCKS = (
    *(f"transformer_blocks.{index}" for index in range(3)),
    *(f"single_transformer_blocks.{index}" for index in range(2)),
)


@pytest.fixture
def blocks():
    return BLOCKS
