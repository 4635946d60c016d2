"""Tiny denoisers of diffusers in the shapes that matter here, and what drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omnistage.memory.offload.discovery import streamable_blocks
from omnistage.memory.placement import ComponentPlacement, Placement, Residency


class Pipeline:
    """As much of a pipeline as offloading looks at."""

    def __init__(self, **components: nn.Module) -> None:
        self.components = components
        for name, module in components.items():
            setattr(self, name, module)


@dataclass(frozen=True)
class Model:
    """`inputs(batch)` are the keyword arguments of one call; `latent` names the one that changes
    from step to step."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    latent: str = "hidden_states"


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _qwen() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=6,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )


def _qwen_inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(batch, 16, 16),
        "encoder_hidden_states": _noise(batch, 5, 32),
        "encoder_hidden_states_mask": torch.ones(batch, 5, dtype=torch.long),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, 4, 4)]] * batch,
    }


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def _flux_inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(batch, 16, 16),
        "encoder_hidden_states": _noise(batch, 5, 32),
        "pooled_projections": _noise(batch, 32),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": torch.arange(48.0).view(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=16,
        ffn_dim=32,
        num_layers=4,
        rope_max_seq_len=32,
    )


def _wan_inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(batch, 4, 2, 8, 8),
        "encoder_hidden_states": _noise(batch, 5, 32),
        "timestep": torch.full((batch,), 500),
    }


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )


def _sd3_inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(batch, 4, 8, 8),
        "encoder_hidden_states": _noise(batch, 5, 32),
        "pooled_projections": _noise(batch, 32),
        "timestep": torch.full((batch,), 500),
    }


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
        cross_attention_dim=32,
    )


def _unet_inputs(batch: int) -> dict[str, Any]:
    return {
        "sample": _noise(batch, 4, 8, 8),
        "encoder_hidden_states": _noise(batch, 5, 32),
        "timestep": torch.tensor(500),
    }


MODELS = {
    "qwen": Model(_qwen, _qwen_inputs),
    "flux": Model(_flux, _flux_inputs),
    "wan": Model(_wan, _wan_inputs),
    "sd3": Model(_sd3, _sd3_inputs),
    "unet": Model(_unet, _unet_inputs, latent="sample"),
}


def built(name: str, seed: int = 0) -> nn.Module:
    """In evaluation mode, no weight zero."""
    torch.manual_seed(seed)
    module = MODELS[name].build().eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return module


def run(
    module: nn.Module, name: str, batch: int = 1, steps: int = 3, device: str = "cpu"
) -> torch.Tensor:
    """A few steps of a crude sampler; batch elements differ."""
    model = MODELS[name]
    inputs = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in model.inputs(batch).items()
    }
    with torch.no_grad():
        for _ in range(steps):
            latent = inputs[model.latent]
            inputs[model.latent] = latent - 0.1 * module(**inputs, return_dict=False)[0]
    result: torch.Tensor = inputs[model.latent]
    return result


def placed(module: nn.Module, residents: tuple[int, ...] = (), **settings: Any) -> Placement:
    """`module` as "transformer", all blocks but those of these indices streamed."""
    return placement_of({"transformer": module}, residents, **settings)


def placement_of(
    modules: dict[str, nn.Module], residents: tuple[int, ...] = (), **settings: Any
) -> Placement:
    components = {}
    for name, module in modules.items():
        paths = streamable_blocks(module, name)
        streamed = tuple(path for index, path in enumerate(paths) if index not in residents)
        components[name] = ComponentPlacement(
            component=name,
            residency=Residency.STREAMED if streamed else Residency.RESIDENT,
            weight_bytes=sum(one.nbytes for one in module.parameters()),
            streamed_blocks=streamed,
        )
    return Placement(strategy="layerwise", components=components, **settings)
