"""Flux: double-stream and single-stream blocks conditioned on CLIP and T5."""

from ..autoencoders import flow_autoencoder
from ..encoders import HIDDEN_SIZE, clip_encoder, t5_encoder
from ..family import text_to_image
from ..tokens import clip_tokenizer, t5_tokenizer


@text_to_image("FluxPipeline", guidance_scale=3.5, max_sequence_length=48)
def flux():
    """Guidance-distilled (dev): the scale is an input of the transformer, one pass a step."""
    from diffusers import FluxPipeline

    return FluxPipeline(**flux_components())


def flux_components() -> dict:
    """The transformer takes the 4 latent channels of a 2 x 2 patch as one token of 16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=4096,
            max_shift=1.15,
            shift=3.0,
            use_dynamic_shifting=True,
        ),
        "vae": flow_autoencoder(),
        "text_encoder": clip_encoder(clip),
        "tokenizer": clip,
        "text_encoder_2": t5_encoder(t5),
        "tokenizer_2": t5,
        "transformer": FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN_SIZE,
            pooled_projection_dim=HIDDEN_SIZE,
            axes_dims_rope=[4, 4, 8],
            guidance_embeds=True,
        ),
    }
