"""Stability's models: SD 1.5 and SDXL with their UNets, SD3 with its joint transformer."""

from ..autoencoders import autoencoder_kl, flow_autoencoder
from ..encoders import HIDDEN_SIZE, clip_encoder, projected_clip_encoder, t5_encoder
from ..family import NEGATIVE_PROMPT, image_to_image, text_to_image
from ..tokens import clip_tokenizer, t5_tokenizer

GUIDED = {"negative_prompt": NEGATIVE_PROMPT, "guidance_scale": 5.0}


@text_to_image("StableDiffusionPipeline", **GUIDED)
def sd15():
    """The scheduler (PNDM) keeps earlier predictions: state that must be one request's own.

    `safety_checker` and `feature_extractor` are null in `model_index.json`.
    """
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(**_sd15_components())


@image_to_image("StableDiffusionImg2ImgPipeline", strength=0.75, **GUIDED)
def sd15_img2img():
    """`strength` drops the first steps: 3 of 4 run, from the noised image."""
    from diffusers import StableDiffusionImg2ImgPipeline

    return StableDiffusionImg2ImgPipeline(**_sd15_components())


@image_to_image("StableDiffusionInstructPix2PixPipeline", image_guidance_scale=1.5, **GUIDED)
def instruct_pix2pix():
    """Three branches a step: text and image, image, neither."""
    from diffusers import StableDiffusionInstructPix2PixPipeline

    return StableDiffusionInstructPix2PixPipeline(**_sd15_components(in_channels=8))


def _sd15_components(in_channels: int = 4) -> dict:
    from diffusers import PNDMScheduler

    clip = clip_tokenizer()
    return {
        "vae": autoencoder_kl(),
        "text_encoder": clip_encoder(clip),
        "tokenizer": clip,
        "unet": _unet(in_channels=in_channels, cross_attention_dim=HIDDEN_SIZE),
        "scheduler": PNDMScheduler(**_noise_schedule(), skip_prk_steps=True),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


@text_to_image("StableDiffusionXLPipeline", **GUIDED)
def sdxl():
    """The UNet also takes the pooled text and six sizes (original, crop, target)."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    size_embedding = 8
    clip, clip_2 = clip_tokenizer(), clip_tokenizer()
    return StableDiffusionXLPipeline(
        vae=autoencoder_kl(scaling_factor=0.13025),
        text_encoder=clip_encoder(clip),
        text_encoder_2=projected_clip_encoder(clip_2),
        tokenizer=clip,
        tokenizer_2=clip_2,
        unet=_unet(
            cross_attention_dim=2 * HIDDEN_SIZE,
            addition_embed_type="text_time",
            addition_time_embed_dim=size_embedding,
            projection_class_embeddings_input_dim=HIDDEN_SIZE + 6 * size_embedding,
        ),
        scheduler=EulerDiscreteScheduler(**_noise_schedule()),
        add_watermarker=False,
    )


def _noise_schedule() -> dict:
    return {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "steps_offset": 1,
        "timestep_spacing": "leading",
    }


def _unet(**config):
    from diffusers import UNet2DConditionModel

    defaults = {
        "sample_size": 32,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return UNet2DConditionModel(**defaults | config)


@text_to_image("StableDiffusion3Pipeline", max_sequence_length=48, **GUIDED)
def sd3():
    """The two CLIP encodings lie side by side, padded to T5's width, then T5's follow."""
    return _sd3_pipeline()


@text_to_image("StableDiffusion3Pipeline", max_sequence_length=48, **GUIDED)
def sd35():
    """3.5 medium: normalized queries and keys, a second attention over the picture alone."""
    return _sd3_pipeline(qk_norm="rms_norm", dual_attention_layers=(0,))


def _sd3_pipeline(**config):
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    both_clips = 2 * HIDDEN_SIZE
    clip, clip_2, t5 = clip_tokenizer(), clip_tokenizer(), t5_tokenizer()
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flow_autoencoder(),
        text_encoder=projected_clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=projected_clip_encoder(clip_2),
        tokenizer_2=clip_2,
        text_encoder_3=t5_encoder(t5, d_model=both_clips),
        tokenizer_3=t5,
        transformer=SD3Transformer2DModel(
            sample_size=32,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=both_clips,
            pooled_projection_dim=both_clips,
            pos_embed_max_size=32,
            **config,
        ),
    )
