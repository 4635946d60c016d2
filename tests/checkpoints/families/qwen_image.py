"""Qwen-Image and its editor: a joint transformer conditioned on Qwen2.5-VL."""

from ..autoencoders import qwen_image_autoencoder
from ..encoders import HIDDEN_SIZE, qwen25_vl
from ..family import NEGATIVE_PROMPT, image_to_image, text_to_image
from ..tokens import qwen2_tokenizer


@text_to_image(
    "QwenImagePipeline",
    negative_prompt=NEGATIVE_PROMPT,
    true_cfg_scale=4.0,
    max_sequence_length=64,
)
def qwen_image():
    """Guidance is `true_cfg_scale`; `guidance_scale` serves guidance-distilled models only."""
    from diffusers import QwenImagePipeline

    tokenizer = qwen2_tokenizer()
    return QwenImagePipeline(
        scheduler=_scheduler(),
        vae=qwen_image_autoencoder(),
        text_encoder=qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        transformer=_transformer(),
    )


@image_to_image(
    "QwenImageEditPipeline",
    negative_prompt=NEGATIVE_PROMPT,
    true_cfg_scale=4.0,
    num_inference_steps=3,
    height=64,
    width=128,
)
def qwen_image_edit():
    """Enlarges any image to 1 Mpx, hence an autoencoder of 32 x 32 and 260 tokens for it.

    The processor, which feeds the vision tower, shrinks the image again.
    """
    from diffusers import QwenImageEditPipeline

    return _editor(QwenImageEditPipeline)


@image_to_image(
    "QwenImageEditPlusPipeline",
    negative_prompt=NEGATIVE_PROMPT,
    true_cfg_scale=4.0,
    num_inference_steps=3,
    height=64,
    width=128,
)
def qwen_image_edit_plus():
    """Takes several images, and shows them smaller to the text encoder.

    Its images' tokens are modulated as at time zero (the checkpoint of November 2025).
    """
    from diffusers import QwenImageEditPlusPipeline

    return _editor(QwenImageEditPlusPipeline, zero_cond_t=True)


def _editor(pipeline_class, **config):
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    tokenizer = qwen2_tokenizer()
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=84 * 84),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    return pipeline_class(
        scheduler=_scheduler(),
        vae=qwen_image_autoencoder(levels=5),
        text_encoder=qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        processor=processor,
        transformer=_transformer(**config),
    )


def _scheduler():
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
    )


def _transformer(**config):
    """Takes the 4 latent channels of a 2 x 2 patch as one token of 16."""
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN_SIZE,
        axes_dims_rope=(8, 4, 4),
        **config,
    )
