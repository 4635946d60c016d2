"""Training of the autoencoder: 128x128 pictures to 16x16x16 latents and back."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor
from training.tiny_image.components import LATENT_CHANNELS, build_autoencoder
from training.tiny_image.loop import Schedule, build_optimizer, record, run_steps
from training.tiny_image.render import SceneBatch, render

SAMPLE_COUNT = 1024  # pictures that the latents' statistics and the reported PSNR are taken over
KL_WEIGHT = 3e-4  # per latent element, against an error per pixel channel
EDGE_WEIGHT = 1.0
PEAK_LEARNING_RATE = 2e-3


@contextmanager
def single_frame_convolutions() -> Iterator[None]:
    """Run the causal 3D convolutions as 2D ones, which is the same on a single frame.

    A lone frame only ever meets the last of a kernel's temporal taps; the others see padding.
    """

    def forward(conv: QwenImageCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        padding = conv._padding[0]
        frame = F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, conv.stride[1:], padding)
        return frame[:, :, None]

    original = QwenImageCausalConv3d.forward
    QwenImageCausalConv3d.forward = forward
    try:
        yield
    finally:
        QwenImageCausalConv3d.forward = original


def clear_unused_taps(autoencoder: AutoencoderKLQwenImage) -> None:
    """Zero the temporal taps that a single frame never meets, and so nothing trained."""
    for module in autoencoder.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.weight.data[:, :, :-1] = 0


def encode_moments(autoencoder: AutoencoderKLQwenImage, images: Tensor) -> tuple[Tensor, Tensor]:
    """Images [N, 3, H, W] in -1..1 -> posterior mean, log-variance: float32 [N, 16, H/8, W/8]."""
    moments = autoencoder.quant_conv(autoencoder.encoder(images[:, :, None]))[:, :, 0].float()
    mean, log_variance = moments.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode_images(autoencoder: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    """Latents [N, 16, h, w] -> float32 images [N, 3, 8h, 8w], not clamped."""
    frames = autoencoder.decoder(autoencoder.post_quant_conv(latents[:, :, None]))
    return frames[:, :, 0].float()


def edges(images: Tensor) -> tuple[Tensor, Tensor]:
    """Horizontal and vertical differences of neighbouring pixels."""
    return images.diff(dim=-1), images.diff(dim=-2)


def reconstruction_loss(autoencoder: AutoencoderKLQwenImage, images: Tensor) -> dict[str, Tensor]:
    """Pixel, edge and KL terms of a batch of images [N, 3, H, W]."""
    mean, log_variance = encode_moments(autoencoder, images)
    latents = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
    decoded = decode_images(autoencoder, latents)
    edge = sum(
        F.l1_loss(ours, theirs) for ours, theirs in zip(edges(decoded), edges(images), strict=True)
    )
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    pixel = F.l1_loss(decoded, images) + F.mse_loss(decoded, images)
    return {"loss": pixel + EDGE_WEIGHT * edge + KL_WEIGHT * kl, "pixel": pixel, "kl": kl}


def record_latent_statistics(autoencoder: AutoencoderKLQwenImage, images: Tensor) -> None:
    """Write the latents' mean and deviation per channel into the config, as the pipeline reads."""
    mean, log_variance = encode_moments(autoencoder, images)
    channels = mean.transpose(0, 1).reshape(LATENT_CHANNELS, -1)
    noise = log_variance.exp().transpose(0, 1).reshape(LATENT_CHANNELS, -1).mean(1)
    deviation = (channels.var(dim=1) + noise).sqrt()
    autoencoder.register_to_config(
        latents_mean=[round(value, 5) for value in channels.mean(dim=1).tolist()],
        latents_std=[round(value, 5) for value in deviation.tolist()],
    )


def train_autoencoder(
    scenes: SceneBatch, schedule: Schedule, batch_size: int, log: Callable[..., None], graph: bool
) -> AutoencoderKLQwenImage:
    """Train from scratch on the scenes' device until the schedule ends."""
    device = scenes.disc.device
    autoencoder = build_autoencoder().to(device)
    groups = [{"params": list(autoencoder.parameters()), "weight_decay": 1e-3}]
    optimizer, learning_rate = build_optimizer(groups, device)

    def step() -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        rows = torch.randint(len(scenes), (batch_size,), device=device)
        images = render(scenes[rows])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            terms = reconstruction_loss(autoencoder, images)
        terms["loss"].backward()
        torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        return {name: term.detach() for name, term in terms.items()}

    with single_frame_convolutions():
        if graph:
            autoencoder.encoder.compile()
            autoencoder.decoder.compile()
            step = record(step)
        run_steps(step, schedule, learning_rate, PEAK_LEARNING_RATE, log)
        clear_unused_taps(autoencoder)
        images = render(scenes[:SAMPLE_COUNT])
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            record_latent_statistics(autoencoder, images)
            decoded = decode_images(autoencoder, encode_moments(autoencoder, images)[0])
    psnr = 10 * math.log10(4 / F.mse_loss(decoded.clamp(-1, 1), images).item())
    log(psnr_db=round(psnr, 2), latents_std=autoencoder.config.latents_std)
    return autoencoder
