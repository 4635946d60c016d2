"""Autoencoders small enough to decode in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderKLQwenImage


def autoencoder_kl(latent_channels: int = 4, **config) -> AutoencoderKL:
    """Two levels: latents are half as high and wide as the image."""
    from diffusers import AutoencoderKL

    defaults = {
        "latent_channels": latent_channels,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "sample_size": 64,
    }
    return AutoencoderKL(**defaults | config)


def flow_autoencoder(latent_channels: int = 4) -> AutoencoderKL:
    """As in Flux and SD3: latents are shifted, and no 1 x 1 convolution stands between."""
    return autoencoder_kl(
        latent_channels,
        shift_factor=0.0609,
        scaling_factor=1.5035,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def qwen_image_autoencoder(latent_channels: int = 4) -> AutoencoderKLQwenImage:
    """A video autoencoder run on one frame: latents (B, C, 1, H / 4, W / 4)."""
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=latent_channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],  # the library's spelling
        latents_mean=[0.1, -0.2, 0.3, -0.4][:latent_channels],
        latents_std=[1.1, 0.9, 1.2, 0.8][:latent_channels],
    )
