"""Stability's models: SD3 with its joint transformer."""

from ..autoencoders import flow_autoencoder
from ..encoders import HIDDEN_SIZE, projected_clip_encoder, t5_encoder
from ..family import NEGATIVE_PROMPT, text_to_image
from ..tokens import clip_tokenizer, t5_tokenizer


@text_to_image(
    "StableDiffusion3Pipeline",
    negative_prompt=NEGATIVE_PROMPT,
    guidance_scale=5.0,
    max_sequence_length=48,
)
def sd3():
    """The two CLIP encodings lie side by side, padded to T5's width, then T5's follow."""
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
        ),
    )
