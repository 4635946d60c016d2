"""Joint training of the transformer and the text encoder by flow matching on the latents."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor, nn
from training.tiny_image.autoencoder import encode_moments, single_frame_convolutions
from training.tiny_image.components import (
    LATENT_SIZE,
    SCHEDULE_SHIFT,
    build_text_encoder,
    build_transformer,
)
from training.tiny_image.dataset import Pairs
from training.tiny_image.loop import Schedule, build_optimizer, record, run_steps
from training.tiny_image.render import render
from training.tiny_image.tokenizer import PREFIX_LENGTH
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

PEAK_LEARNING_RATE = 1.5e-3
EMA_DECAY = 0.998


class Denoiser(nn.Module):
    """Text encoder and transformer as one trainable module."""

    def __init__(
        self,
        text_encoder: Qwen2_5_VLForConditionalGeneration,
        transformer: QwenImageTransformer2DModel,
    ) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        self.transformer = transformer

    def encode_text(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What `QwenImagePipeline.encode_prompt` gives: last hidden states after the prefix.

        ids int64 [N, L] right-padded, lengths [N] -> embeddings [N, L - 34, 128], zero where
        padded, and a bool mask [N, L - 34].  Attention is causal, so no real token sees padding.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        language_model = self.text_encoder.model.language_model
        hidden = language_model(
            inputs_embeds=language_model.embed_tokens(ids),
            position_ids=positions.expand(3, len(ids), -1),
            attention_mask={"full_attention": None},  # causal, and no look at the padding
            use_cache=False,
        ).last_hidden_state[:, PREFIX_LENGTH:]
        mask = positions[PREFIX_LENGTH:] < lengths[:, None]
        return hidden * mask[:, :, None], mask

    def forward(self, noisy: Tensor, sigma: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """Velocity at noise level sigma [N] of packed latents [N, 64, 64]."""
        text, mask = self.encode_text(ids, lengths)
        grid = LATENT_SIZE // 2
        return self.transformer(
            hidden_states=noisy,
            timestep=sigma,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, grid, grid)]] * len(noisy),
            return_dict=False,
        )[0]


@contextmanager
def lean_transformer(transformer: QwenImageTransformer2DModel) -> Iterator[None]:
    """Compute the same in a way that compiles and records well.

    Queries and keys are rotated in real arithmetic, which the compiler can fuse, and the lengths of
    the texts, which nothing uses, are not copied from the host.
    """
    complex_embedding = transformer.pos_embed.forward
    complex_rotation = transformer_qwenimage.apply_rotary_emb_qwen
    text_lengths = transformer_qwenimage.compute_text_seq_len_from_mask

    def embed(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return tuple(torch.view_as_real(table) for table in complex_embedding(*args, **kwargs))

    def rotate(x: Tensor, table: Tensor, use_real: bool = False) -> Tensor:
        """x [N, S, heads, D], table [S, D / 2, 2] of (cos, sin)."""
        cos, sin = table[:, None].unbind(-1)
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).type_as(x)

    def keep_mask(text: Tensor, mask: Tensor) -> tuple[int, None, Tensor]:
        return text.shape[1], None, mask

    transformer.pos_embed.forward = embed
    transformer_qwenimage.compute_text_seq_len_from_mask = keep_mask
    transformer_qwenimage.apply_rotary_emb_qwen = rotate
    try:
        yield
    finally:
        del transformer.pos_embed.forward
        transformer_qwenimage.apply_rotary_emb_qwen = complex_rotation
        transformer_qwenimage.compute_text_seq_len_from_mask = text_lengths


@torch.no_grad()
def encode_dataset(autoencoder: AutoencoderKLQwenImage, pairs: Pairs, batch_size: int) -> Tensor:
    """Normalised, packed latents of every scene: bfloat16 [N, 64, 64] on the scenes' device."""
    device = pairs.scenes.disc.device
    mean = torch.tensor(autoencoder.config.latents_mean, device=device).view(1, -1, 1, 1)
    deviation = torch.tensor(autoencoder.config.latents_std, device=device).view(1, -1, 1, 1)
    packed = []
    with (
        single_frame_convolutions(),
        torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
    ):
        for start in range(0, len(pairs.scenes), batch_size):
            images = render(pairs.scenes[start : start + batch_size])
            latents = (encode_moments(autoencoder, images)[0] - mean) / deviation
            packed.append(QwenImagePipeline._pack_latents(latents, *latents.shape).bfloat16())
    return torch.cat(packed)


def sample_sigmas(count: int, device: torch.device) -> Tensor:
    """Noise levels, spread like the scheduler's steps: float32 [count], exact in bfloat16."""
    uniform = torch.rand(count, device=device)
    shifted = SCHEDULE_SHIFT * uniform / (1 + (SCHEDULE_SHIFT - 1) * uniform)
    return shifted.bfloat16().float()


def _parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]


def train_denoiser(
    pairs: Pairs,
    autoencoder: AutoencoderKLQwenImage,
    tokenizer: Qwen2Tokenizer,
    schedule: Schedule,
    batch_size: int,
    log: Callable[..., None],
    graph: bool,
    resume_from: dict[str, Tensor] | None = None,
) -> Denoiser:
    """Train until the schedule ends; returns the moving average of the weights."""
    device = pairs.scenes.disc.device
    latents = encode_dataset(autoencoder, pairs, batch_size)
    log(encoded=len(latents))
    denoiser = Denoiser(build_text_encoder(tokenizer), build_transformer()).to(device)
    if resume_from is not None:
        denoiser.load_state_dict(resume_from, strict=False)
    denoiser.text_encoder.model.visual.requires_grad_(False)
    average = deepcopy(denoiser)
    trained = [p for p in denoiser.parameters() if p.requires_grad]
    averaged = [p.data for p in average.parameters() if p.requires_grad]
    optimizer, learning_rate = build_optimizer(_parameter_groups(denoiser), device)

    def step() -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        rows = torch.randint(len(latents), (batch_size,), device=device)
        clean, sigma = latents[rows].float(), sample_sigmas(batch_size, device)
        noise = torch.randn_like(clean)
        noisy = torch.lerp(clean, noise, sigma[:, None, None])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            velocity = denoiser(noisy, sigma, pairs.ids[rows].long(), pairs.lengths[rows])
        loss = F.mse_loss(velocity.float(), noise - clean)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        torch._foreach_lerp_(averaged, [p.data for p in trained], 1 - EMA_DECAY)
        return {"loss": loss.detach()}

    with lean_transformer(denoiser.transformer):
        if graph:
            denoiser.transformer.compile_repeated_blocks(dynamic=False)
            for layer in denoiser.text_encoder.model.language_model.layers:
                layer.compile(dynamic=False)
            step = record(step)
        run_steps(step, schedule, learning_rate, PEAK_LEARNING_RATE, log)
    return average
