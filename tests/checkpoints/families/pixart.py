"""PixArt-Sigma: a cross-attention transformer conditioned on T5."""

from ..autoencoders import autoencoder_kl
from ..encoders import HIDDEN_SIZE, t5_encoder
from ..family import NEGATIVE_PROMPT, text_to_image
from ..tokens import t5_tokenizer


@text_to_image(
    "PixArtSigmaPipeline",
    negative_prompt=NEGATIVE_PROMPT,
    guidance_scale=4.5,
    max_sequence_length=32,
    clean_caption=False,
    use_resolution_binning=False,
)
def pixart_sigma():
    """Predicts a variance beside the noise (twice the channels out).

    The pipeline's defaults would clean captions with optional packages and snap the size to
    its table for `sample_size`, hence the two switches.
    """
    from diffusers import (
        DPMSolverMultistepScheduler,
        PixArtSigmaPipeline,
        PixArtTransformer2DModel,
    )

    tokenizer = t5_tokenizer()
    return PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(tokenizer),
        vae=autoencoder_kl(),
        transformer=PixArtTransformer2DModel(
            sample_size=32,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            cross_attention_dim=32,
            caption_channels=HIDDEN_SIZE,
            use_additional_conditions=False,
        ),
        scheduler=DPMSolverMultistepScheduler(),
    )
