"""Autoencoders small enough to decode in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import diffusers


def autoencoder_kl(latent_channels: int = 4, levels: int = 2, **config) -> diffusers.AutoencoderKL:
    """Latents (B, C, H / 2**(levels - 1), W / 2**(levels - 1)).

    Two levels unless the pipeline takes the 8 x 8 of the real four for granted.
    """
    from diffusers import AutoencoderKL

    return AutoencoderKL(**_levels_config(latent_channels, levels) | config)


def _levels_config(latent_channels: int, levels: int = 2) -> dict:
    return {
        "latent_channels": latent_channels,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "block_out_channels": (4,) * (levels - 1) + (8,),
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "sample_size": 64,
    }


def flow_autoencoder(latent_channels: int = 4, levels: int = 2) -> diffusers.AutoencoderKL:
    """As in Flux and SD3: latents are shifted, and no 1 x 1 convolution stands between."""
    return autoencoder_kl(
        latent_channels,
        levels,
        shift_factor=0.0609,
        scaling_factor=1.5035,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def flux2_autoencoder(latent_channels: int = 4) -> diffusers.AutoencoderKLFlux2:
    """Carries the running statistics of a batch norm, buffers that scale 2 x 2 latent patches."""
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(**_levels_config(latent_channels))


def deep_compression_autoencoder(latent_channels: int = 4) -> diffusers.AutoencoderDC:
    """Sana's, of two levels, the inner one with linear attention. Encodes to latents outright, not
    to a distribution."""
    from diffusers import AutoencoderDC

    return AutoencoderDC(
        latent_channels=latent_channels,
        attention_head_dim=4,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        upsample_block_type="interpolate",
        downsample_block_type="stride_conv",
        scaling_factor=0.41407,
    )


def movq(latent_channels: int = 4) -> diffusers.VQModel:
    """Kandinsky's: every norm of the decoder is conditioned on the latents."""
    from diffusers import VQModel

    return VQModel(
        latent_channels=latent_channels,
        vq_embed_dim=latent_channels,
        num_vq_embeddings=12,
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(32, 32),  # that norm has 32 groups, always
        layers_per_block=1,
        norm_type="spatial",
    )


def qwen_image_autoencoder(levels: int = 2) -> diffusers.AutoencoderKLQwenImage:
    """A video autoencoder run on one frame: latents (B, 4, 1, H / 2**levels, W / 2**levels).

    Its norms divide by the length of the channels' vector, which for fewer than 4 channels comes
    near 0 often enough to make pictures chaotic.
    """
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1] + [2] * levels,
        num_res_blocks=1,
        temperal_downsample=[False] + [True] * (levels - 1),  # the library's spelling
        latents_mean=[0.1, -0.2, 0.3, -0.4],
        latents_std=[1.1, 0.9, 1.2, 0.8],
    )
