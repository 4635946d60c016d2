"""Denoisers that read the text by cross-attention: PixArt, Sana, Hunyuan-DiT, Kandinsky 3."""

from ..autoencoders import autoencoder_kl, deep_compression_autoencoder, movq
from ..encoders import HIDDEN_SIZE, bert_encoder, gemma2_encoder, t5_encoder
from ..family import NEGATIVE_PROMPT, text_to_image
from ..tokens import bert_tokenizer, gemma_tokenizer, t5_tokenizer

GUIDED = {"negative_prompt": NEGATIVE_PROMPT, "guidance_scale": 4.5}


@text_to_image(
    "PixArtSigmaPipeline",
    **GUIDED,
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


@text_to_image(
    "SanaPipeline", **GUIDED, width=64, max_sequence_length=32, use_resolution_binning=False
)
def sana():
    """Linear attention; an instruction of 1050 characters goes before every prompt."""
    from diffusers import DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    tokenizer = gemma_tokenizer(max_length=2048)
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma2_encoder(tokenizer),
        vae=deep_compression_autoencoder(),
        transformer=SanaTransformer2DModel(
            sample_size=32,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            num_cross_attention_heads=4,
            cross_attention_head_dim=8,
            cross_attention_dim=32,
            caption_channels=HIDDEN_SIZE,
        ),
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


@text_to_image("HunyuanDiTPipeline", **GUIDED, height=64, width=96, use_resolution_binning=False)
def hunyuan_dit():
    """BERT and T5 at fixed lengths of 77 and 256 tokens; skips join early and late blocks."""
    from diffusers import DDPMScheduler, HunyuanDiT2DModel, HunyuanDiTPipeline

    bert, t5 = bert_tokenizer(), t5_tokenizer()
    return HunyuanDiTPipeline(
        vae=autoencoder_kl(levels=4),
        text_encoder=bert_encoder(bert),
        tokenizer=bert,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
        transformer=HunyuanDiT2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=4,
            hidden_size=32,
            cross_attention_dim=HIDDEN_SIZE,
            cross_attention_dim_t5=HIDDEN_SIZE,
            pooled_projection_dim=16,
            use_style_cond_and_image_meta_size=False,  # as from version 1.2 on
        ),
        scheduler=DDPMScheduler(beta_schedule="scaled_linear", prediction_type="v_prediction"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@text_to_image(
    "Kandinsky3Pipeline",
    **GUIDED | {"guidance_scale": 2.0},
    num_inference_steps=3,
    height=64,
    width=128,
)
def kandinsky3():
    """Its components are `unet` and `movq`. Latents are an eighth of the size asked for, and this
    movq only doubles them: 64 x 128 comes out as 16 x 32. A picture of `output_type="pt"` is not
    brought to [0, 1].
    """
    from diffusers import DDPMScheduler, Kandinsky3Pipeline, Kandinsky3UNet

    tokenizer = t5_tokenizer()
    return Kandinsky3Pipeline(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(tokenizer),
        unet=Kandinsky3UNet(
            time_embedding_dim=8,
            groups=2,
            attention_head_dim=4,
            layers_per_block=2,
            block_out_channels=(8, 16),
            cross_attention_dim=8,
            encoder_hid_dim=HIDDEN_SIZE,
        ),
        scheduler=DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012),
        movq=movq(),
    )
