"""Denoisers that attend over text and image together, conditioned on a language model."""

from ..autoencoders import autoencoder_kl, flow_autoencoder
from ..encoders import (
    HIDDEN_SIZE,
    gemma2_encoder,
    glm_encoder,
    llama,
    projected_clip_encoder,
    qwen3_encoder,
    t5_encoder,
    umt5_encoder,
)
from ..family import NEGATIVE_PROMPT, text_to_image
from ..tokens import (
    clip_tokenizer,
    gemma_tokenizer,
    glm_tokenizer,
    llama_tokenizer,
    qwen2_tokenizer,
    t5_tokenizer,
)

GUIDED = {"negative_prompt": NEGATIVE_PROMPT, "guidance_scale": 4.0}


@text_to_image("ZImagePipeline", **GUIDED, max_sequence_length=64)
def z_image():
    """The transformer takes and returns lists of (C, 1, H, W), not batches.

    Its rotary tables are complex, made on first use and no buffers. Sequences are padded to
    multiples of 32 with learned tokens.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer = qwen2_tokenizer()
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flow_autoencoder(),
        text_encoder=qwen3_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=16,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=1,
            n_kv_heads=1,
            cap_feat_dim=HIDDEN_SIZE,
            axes_dims=[4, 6, 6],
            axes_lens=[256, 64, 64],
        ),
    )


@text_to_image("Lumina2Pipeline", **GUIDED, height=64, width=96, max_sequence_length=224)
def lumina2():
    """A system prompt of 150 characters goes before every prompt and counts as its length."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        Lumina2Pipeline,
        Lumina2Transformer2DModel,
    )

    tokenizer = gemma_tokenizer()
    return Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(
            sample_size=32,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=4,
            num_kv_heads=2,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            cap_feat_dim=HIDDEN_SIZE,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=flow_autoencoder(levels=4),
        text_encoder=gemma2_encoder(tokenizer),
        tokenizer=tokenizer,
    )


@text_to_image("AuraFlowPipeline", **GUIDED, max_sequence_length=16)
def auraflow():
    from diffusers import (
        AuraFlowPipeline,
        AuraFlowTransformer2DModel,
        FlowMatchEulerDiscreteScheduler,
    )

    tokenizer = llama_tokenizer()
    return AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=umt5_encoder(tokenizer),
        vae=autoencoder_kl(),
        transformer=AuraFlowTransformer2DModel(
            sample_size=32,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=HIDDEN_SIZE,
            caption_projection_dim=32,
            pos_embed_max_size=256,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


@text_to_image("CogView4Pipeline", **GUIDED, max_sequence_length=64)
def cogview4():
    """Text is padded on the left to multiples of 16, without a mask."""
    from diffusers import (
        CogView4Pipeline,
        CogView4Transformer2DModel,
        FlowMatchEulerDiscreteScheduler,
    )

    tokenizer = glm_tokenizer()
    return CogView4Pipeline(
        tokenizer=tokenizer,
        text_encoder=glm_encoder(tokenizer),
        vae=flow_autoencoder(),
        transformer=CogView4Transformer2DModel(
            sample_size=32,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=HIDDEN_SIZE,
            time_embed_dim=16,
            condition_dim=8,
            rope_axes_dim=(64, 64),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.25,
            max_shift=0.75,
            base_image_seq_len=256,
            use_dynamic_shifting=True,
            time_shift_type="linear",
        ),
    )


@text_to_image("HiDreamImagePipeline", **GUIDED, width=128, max_sequence_length=32)
def hidream():
    """Four text encoders; experts in the transformer; velocity comes out with its sign turned.

    Any size is scaled to 128 x 128 latents' area: 32 x 128 comes out as 128 x 512.
    """
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        HiDreamImagePipeline,
        HiDreamImageTransformer2DModel,
    )

    clip, clip_2, t5, llama_tokens = (
        clip_tokenizer(),
        clip_tokenizer(),
        t5_tokenizer(),
        llama_tokenizer(),
    )
    return HiDreamImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flow_autoencoder(),
        text_encoder=projected_clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=projected_clip_encoder(clip_2),
        tokenizer_2=clip_2,
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
        text_encoder_4=llama(llama_tokens),
        tokenizer_4=llama_tokens,
        transformer=HiDreamImageTransformer2DModel(
            patch_size=4,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=[HIDDEN_SIZE, HIDDEN_SIZE],
            text_emb_dim=2 * HIDDEN_SIZE,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(128, 128),
            llama_layers=[0, 1],
        ),
    )


@text_to_image("OmniGenPipeline", height=64, width=96, guidance_scale=2.5)
def omnigen():
    """No text encoder: the transformer is a language model and embeds the tokens itself."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        OmniGenPipeline,
        OmniGenTransformer2DModel,
    )

    tokenizer = llama_tokenizer()
    return OmniGenPipeline(
        transformer=OmniGenTransformer2DModel(
            in_channels=4,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=32,
            num_layers=2,
            pad_token_id=tokenizer.pad_token_id,
            vocab_size=len(tokenizer),
            rope_scaling={"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
            pos_embed_max_size=32,
            time_step_dim=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True, num_train_timesteps=1),
        vae=autoencoder_kl(levels=4),
        tokenizer=tokenizer,
    )
