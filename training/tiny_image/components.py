"""The five untrained parts of the pipeline, in the exact Qwen-Image layout."""

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import nn
from training.tiny_image.tokenizer import SPECIAL_TOKENS
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

LATENT_CHANNELS = 16
LATENT_SIZE = 16  # latent pixels per side of a 128-pixel picture: the autoencoder divides by 8
TEXT_WIDTH = 128
SCHEDULE_SHIFT = 2.0


def build_autoencoder() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2, 3],
        num_res_blocks=1,
        temperal_downsample=[False, False, False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def build_transformer() -> QwenImageTransformer2DModel:
    """Six double-stream blocks, each the identity at first: its modulation starts at zero."""
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=LATENT_CHANNELS * 4,
        out_channels=LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    zero_layers = [transformer.norm_out.linear, transformer.proj_out]
    for block in transformer.transformer_blocks:
        zero_layers += [block.img_mod[1], block.txt_mod[1]]
    for layer in zero_layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return transformer


def build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """A three-layer language model, with the layout's vision tower as small as it can be."""
    token_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "mrope_section": [4, 6, 6],
                "rope_type": "default",
                "rope_theta": 10000.0,
            },
            "bos_token_id": token_ids["<|endoftext|>"],
            "eos_token_id": token_ids["<|im_end|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [0],
            "patch_size": 14,
        },
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """A static shift: at 64 tokens a picture, resolution-dependent shifting has nothing to do."""
    return FlowMatchEulerDiscreteScheduler(shift=SCHEDULE_SHIFT, use_dynamic_shifting=False)


def save_pipeline(
    directory: str,
    autoencoder: AutoencoderKLQwenImage,
    transformer: QwenImageTransformer2DModel,
    text_encoder: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
) -> None:
    """Write the pipeline with float16 weights; converts the given modules in place."""
    autoencoder.register_to_config(_name_or_path=None)
    QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=autoencoder.eval().to("cpu", torch.float16),
        text_encoder=text_encoder.eval().to("cpu", torch.float16),
        tokenizer=tokenizer,
        transformer=transformer.eval().to("cpu", torch.float16),
    ).save_pretrained(directory)
