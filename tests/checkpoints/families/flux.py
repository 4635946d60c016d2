"""Flux and its kin: double-stream and single-stream blocks over packed latents.

All their transformers take the 4 latent channels of a 2 x 2 patch as one token of 16.
"""

from ..autoencoders import flow_autoencoder, flux2_autoencoder
from ..encoders import HIDDEN_SIZE, clip_encoder, qwen3, t5_encoder
from ..family import NEGATIVE_PROMPT, image_to_image, text_to_image
from ..tokens import clip_tokenizer, qwen2_tokenizer, t5_tokenizer


@text_to_image("FluxPipeline", guidance_scale=3.5, max_sequence_length=48)
def flux():
    """Guidance-distilled (dev): the scale is an input of the transformer, one pass a step."""
    from diffusers import FluxPipeline

    return FluxPipeline(**_flux_components())


@text_to_image("FluxPipeline", max_sequence_length=48)
def flux_schnell():
    """Made for few steps: no guidance of its own, and a schedule that is not shifted."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    return FluxPipeline(**_flux_components(guidance_embeds=False) | {"scheduler": scheduler})


@image_to_image(
    "FluxKontextPipeline",
    guidance_scale=3.5,
    height=32,
    width=48,
    max_area=32 * 48,
    max_sequence_length=48,
    _auto_resize=False,
)
def flux_kontext():
    """The image's tokens follow the latents'; only `_auto_resize=False` keeps it from 1 Mpx."""
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**_flux_components())


def _flux_components(guidance_embeds: bool = True) -> dict:
    from diffusers import FluxTransformer2DModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return {
        "scheduler": _scheduler(),
        "vae": flow_autoencoder(),
        "text_encoder": clip_encoder(clip),
        "tokenizer": clip,
        "text_encoder_2": t5_encoder(t5),
        "tokenizer_2": t5,
        "transformer": FluxTransformer2DModel(
            **_two_stream_config(),
            pooled_projection_dim=HIDDEN_SIZE,
            guidance_embeds=guidance_embeds,
        ),
    }


@text_to_image(
    "ChromaPipeline", negative_prompt=NEGATIVE_PROMPT, guidance_scale=5.0, max_sequence_length=48
)
def chroma():
    """Flux without CLIP, without distilled guidance, its modulation from one small network."""
    from diffusers import ChromaPipeline, ChromaTransformer2DModel

    t5 = t5_tokenizer()
    return ChromaPipeline(
        scheduler=_scheduler(),
        vae=flow_autoencoder(),
        text_encoder=t5_encoder(t5),
        tokenizer=t5,
        transformer=ChromaTransformer2DModel(
            **_two_stream_config(),
            approximator_num_channels=16,
            approximator_hidden_dim=32,
            approximator_layers=1,
        ),
    )


@text_to_image(
    "BriaPipeline", negative_prompt=NEGATIVE_PROMPT, guidance_scale=5.0, max_sequence_length=48
)
def bria():
    from diffusers import BriaPipeline, BriaTransformer2DModel

    t5 = t5_tokenizer()
    return BriaPipeline(
        scheduler=_scheduler(),
        vae=flow_autoencoder(),
        text_encoder=t5_encoder(t5),
        tokenizer=t5,
        transformer=BriaTransformer2DModel(**_two_stream_config()),
    )


@text_to_image("Flux2KleinPipeline", guidance_scale=4.0, max_sequence_length=64)
def flux2_klein():
    """Conditioned on hidden states 9, 18 and 27 side by side, hence the encoder's depth.

    Guides towards an empty negative prompt, and takes no other.
    """
    from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel

    tokenizer = qwen2_tokenizer()
    encoder = qwen3(tokenizer, num_hidden_layers=28, hidden_size=16, intermediate_size=16)
    return Flux2KleinPipeline(
        scheduler=_scheduler(),
        vae=flux2_autoencoder(),
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(
            **_two_stream_config()
            | {"joint_attention_dim": 3 * 16, "axes_dims_rope": (4, 4, 4, 4)},
            timestep_guidance_channels=32,
            guidance_embeds=False,
        ),
    )


def _scheduler():
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=4096,
        max_shift=1.15,
        shift=3.0,
        use_dynamic_shifting=True,
    )


def _two_stream_config() -> dict:
    return {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": HIDDEN_SIZE,
        "axes_dims_rope": (4, 4, 8),
    }
