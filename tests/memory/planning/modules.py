"""Tiny modules of the libraries' own classes, with what a pass over them takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omnistage.memory.pipeline_plan import PipelinePlan, plan_pipeline
from omnistage.memory.planning.inputs import (
    DENOISERS,
    Run,
    decode_run,
    encode_run,
    frame_of,
    latent_scales,
)
from omnistage.memory.planning.shape import RequestShape
from omnistage.memory.planning.sizes import empty_module
from tests.checkpoints import checkpoint

SHAPE = RequestShape(height=64, width=96, steps=2)


def planned(family: str, dtype: str = "float32", device: str = "cpu") -> PipelinePlan:
    return plan_pipeline(Path(checkpoint(family)), dtype=dtype, device=device)


def run_for(module: torch.nn.Module, dtype: str, vae: torch.nn.Module | None = None) -> Run:
    name = type(module).__name__
    frame = frame_of(SHAPE, 2, 16, dtype, latent_scales(vae))
    if name in DENOISERS:
        return DENOISERS[name].run(frame)
    run = decode_run(name, frame) or encode_run(name, 2, 24)
    assert run is not None, name
    return run


def real(module: torch.nn.Module) -> torch.nn.Module:
    """The same with memory, on the CPU; all weights are small."""
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
            else:
                tensor.zero_()
    return module


def components(family: str, dtype: str = "float32") -> dict[str, Any]:
    """Skeletons by component."""
    plan = planned(family, dtype)
    return {name: empty_module(one) for name, one in plan.modules.items()}


def tiny_wan() -> dict[str, torch.nn.Module]:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    with torch.device("meta"):
        return {
            "transformer": WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=16,
                out_channels=16,
                text_dim=32,
                freq_dim=256,
                ffn_dim=32,
                num_layers=2,
                cross_attn_norm=True,
                qk_norm="rms_norm_across_heads",
                rope_max_seq_len=32,
            ).eval(),
            "vae": AutoencoderKLWan(
                base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1
            ).eval(),
        }
