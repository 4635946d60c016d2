"""Inputs of known denoisers, text encoders and autoencoders for the shape of a request.

By name of class. Sizes are those that the families' pipelines in `diffusers` give their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omnistage.memory.planning.shape import RequestShape

Run = Callable[[Any, str], Any]
"""Makes inputs on a device and calls a module."""

SPATIAL_SCALE = 8
TEMPORAL_SCALE = 4


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The shape of a request as modules see it: `height` and `width` of latents, `frames` of them,
    `rows` of a forward pass."""

    rows: int
    height: int
    width: int
    frames: int
    text_tokens: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class DenoiserKind:
    """`branches` "one batch": both branches of guidance are rows of one pass, "passes": a pass
    each, unless the runtime batches them; "none": there is one branch only."""

    run: Callable[[Frame], Run]
    text_tokens: int
    branches: str
    fixed_text: bool = True
    """Whether the pipeline pads prompts to `text_tokens`."""


def _empty(device: str, dtype: str, *shape: int) -> Any:
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def _qwen_image(frame: Frame) -> Run:
    def run(module: Any, device: str) -> Any:
        height, width = frame.height // 2, frame.width // 2
        config = module.config
        return module(
            hidden_states=_empty(
                device, frame.dtype, frame.rows, height * width, config.in_channels
            ),
            encoder_hidden_states=_empty(
                device, frame.dtype, frame.rows, frame.text_tokens, config.joint_attention_dim
            ),
            timestep=_empty(device, frame.dtype, frame.rows),
            img_shapes=[[(1, height, width)]] * frame.rows,
            return_dict=False,
        )

    return run


def _flux(frame: Frame) -> Run:
    def run(module: Any, device: str) -> Any:
        tokens = (frame.height // 2) * (frame.width // 2)
        config, rows = module.config, frame.rows
        return module(
            hidden_states=_empty(device, frame.dtype, rows, tokens, config.in_channels),
            encoder_hidden_states=_empty(
                device, frame.dtype, rows, frame.text_tokens, config.joint_attention_dim
            ),
            pooled_projections=_empty(device, frame.dtype, rows, config.pooled_projection_dim),
            timestep=_empty(device, frame.dtype, rows),
            img_ids=_empty(device, frame.dtype, tokens, 3),
            txt_ids=_empty(device, frame.dtype, frame.text_tokens, 3),
            guidance=_empty(device, "float32", rows) if config.guidance_embeds else None,
            return_dict=False,
        )

    return run


def _sd3(frame: Frame) -> Run:
    def run(module: Any, device: str) -> Any:
        config, rows = module.config, frame.rows
        return module(
            hidden_states=_empty(
                device, frame.dtype, rows, config.in_channels, frame.height, frame.width
            ),
            encoder_hidden_states=_empty(
                device, frame.dtype, rows, frame.text_tokens, config.joint_attention_dim
            ),
            pooled_projections=_empty(device, frame.dtype, rows, config.pooled_projection_dim),
            timestep=_empty(device, frame.dtype, rows),
            return_dict=False,
        )

    return run


def _wan(frame: Frame) -> Run:
    def run(module: Any, device: str) -> Any:
        config, rows = module.config, frame.rows
        latents = (config.in_channels, frame.frames, frame.height, frame.width)
        return module(
            hidden_states=_empty(device, frame.dtype, rows, *latents),
            timestep=_empty(device, "int64", rows),
            encoder_hidden_states=_empty(
                device, frame.dtype, rows, frame.text_tokens, config.text_dim
            ),
            return_dict=False,
        )

    return run


def _unet(frame: Frame) -> Run:
    def run(module: Any, device: str) -> Any:
        config, rows = module.config, frame.rows
        width = config.cross_attention_dim
        width = width if isinstance(width, int) else width[0]
        added = None
        if config.addition_embed_type == "text_time":
            times = config.addition_time_embed_dim
            pooled = config.projection_class_embeddings_input_dim - 6 * times
            added = {
                "text_embeds": _empty(device, frame.dtype, rows, pooled),
                "time_ids": _empty(device, frame.dtype, rows, 6),
            }
        return module(
            _empty(device, frame.dtype, rows, config.in_channels, frame.height, frame.width),
            _empty(device, "int64", rows),
            encoder_hidden_states=_empty(device, frame.dtype, rows, frame.text_tokens, width),
            added_cond_kwargs=added,
            return_dict=False,
        )

    return run


DENOISERS: Mapping[str, DenoiserKind] = {
    "QwenImageTransformer2DModel": DenoiserKind(
        run=_qwen_image, text_tokens=256, branches="passes", fixed_text=False
    ),
    "FluxTransformer2DModel": DenoiserKind(run=_flux, text_tokens=512, branches="none"),
    "SD3Transformer2DModel": DenoiserKind(run=_sd3, text_tokens=77 + 256, branches="one batch"),
    "WanTransformer3DModel": DenoiserKind(run=_wan, text_tokens=512, branches="passes"),
    "UNet2DConditionModel": DenoiserKind(run=_unet, text_tokens=77, branches="one batch"),
}


def decode_run(cls_name: str, frame: Frame) -> Run | None:
    """Of one request after the other where `rows` is 1. None for an unknown class."""
    volumes = ("AutoencoderKLQwenImage", "AutoencoderKLWan")
    if cls_name not in (*volumes, "AutoencoderKL"):
        return None

    def run(module: Any, device: str) -> Any:
        config = module.config
        if cls_name in volumes:
            shape = (frame.rows, config.z_dim, frame.frames, frame.height, frame.width)
        else:
            shape = (frame.rows, config.latent_channels, frame.height, frame.width)
        return module.decode(_empty(device, frame.dtype, *shape), return_dict=False)

    return run


ENCODER_TOKENS = {
    "CLIPTextModel": 77,
    "CLIPTextModelWithProjection": 77,
    "T5EncoderModel": 512,
    "UMT5EncoderModel": 512,
    "Qwen2_5_VLForConditionalGeneration": 256 + 34,
}
"""Prompts as the pipelines give them: padded, or (Qwen) of the assumed length with its template."""


def encode_run(cls_name: str, rows: int, tokens: int | None) -> Run | None:
    """None for an unknown class."""
    if cls_name not in ENCODER_TOKENS:
        return None
    count = tokens or ENCODER_TOKENS[cls_name]

    def run(module: Any, device: str) -> Any:
        ids = _empty(device, "int64", rows, count)
        return module(input_ids=ids, output_hidden_states=True)

    return run


def latent_scales(autoencoder: Any) -> tuple[int, int]:
    """(spatial, temporal) of a module or None: pixels a latent, frames a latent."""
    if autoencoder is None:
        return SPATIAL_SCALE, TEMPORAL_SCALE
    config = autoencoder.config
    if "scale_factor_spatial" in config:
        return config.scale_factor_spatial, config.scale_factor_temporal
    if "temperal_downsample" in config:
        return 2 ** len(config.temperal_downsample), 2 ** sum(config.temperal_downsample)
    if "block_out_channels" in config:
        return 2 ** (len(config.block_out_channels) - 1), 1
    return SPATIAL_SCALE, TEMPORAL_SCALE


def frame_of(
    shape: RequestShape, rows: int, text_tokens: int, dtype: str, scales: tuple[int, int]
) -> Frame:
    spatial, temporal = scales
    return Frame(
        rows=rows,
        height=max(2, shape.height // spatial // 2 * 2),
        width=max(2, shape.width // spatial // 2 * 2),
        frames=(shape.frames - 1) // temporal + 1,
        text_tokens=text_tokens,
        dtype=dtype,
    )
