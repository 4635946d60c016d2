"""A last stage for the decoder: sharper shapes from the latents as they are.

The encoder stays as it is, so nothing that was trained on its latents has to change.  The cheap
low-resolution half of the decoder runs on whole pictures, the dear high-resolution half only on
windows around the things; so this stage is quick enough for a CPU.
"""

import math
import random
from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageDecoder3d
from torch import Tensor
from training.tiny_image.autoencoder import (
    decode_images,
    edges,
    encode_moments,
    single_frame_convolutions,
)
from training.tiny_image.loop import Schedule, build_optimizer, run_steps
from training.tiny_image.render import batch_scenes, render
from training.tiny_image.scenes import GAP, IMAGE_SIZE, Disc, lay_out, random_training_scene

CELL = 4  # pixels per cell where the windows are cut: after the first of three upsamplings
WINDOW = 14  # cells per side of a window
MARGIN = 2  # cells at a window's border that lack their surroundings and so do not count
LATENT_NOISE = 0.08  # of a latent's deviation: about what the transformer leaves behind
PEAK_LEARNING_RATE = 6e-4
EMA_DECAY = 0.995
STEPS_PER_SAVE = 400
FIRST_SCENES = 48  # encoded before the first step; every step adds one more


class ScenePool:
    """Growing collection of encoded scenes of two things each, on the CPU."""

    def __init__(self, autoencoder: AutoencoderKLQwenImage, seed: int) -> None:
        self._autoencoder = autoencoder
        self._rng = random.Random(seed)
        self._deviation = torch.tensor(autoencoder.config.latents_std).view(-1, 1, 1)
        self._entries: list[tuple[Tensor, Tensor, tuple[Disc, ...]]] = []

    def contents(self) -> tuple[Tensor, Tensor]:
        """All latents [N, 16, 16, 16] and images [N, 3, 128, 128]."""
        latents, images, _ = zip(*self._entries, strict=True)
        return torch.stack(latents), torch.stack(images)

    def grow(self, count: int) -> None:
        """Encode `count` new scenes."""
        scenes = []
        while len(scenes) < count:
            scene = random_training_scene(self._rng)
            if len(scene.things) == 2:
                scenes.append(scene)
        layouts = [lay_out(scene, self._rng) for scene in scenes]
        images = render(batch_scenes(scenes, layouts))
        with torch.no_grad():
            latents, _ = encode_moments(self._autoencoder, images)
        self._entries += zip(latents, images, layouts, strict=True)

    def _corner(self, disc: Disc) -> tuple[int, int]:
        """Column and row, in cells, of a window that shows some of the thing's outline."""
        reach = max(disc.radius - WINDOW * CELL / 4, GAP)
        centre = (value + self._rng.uniform(-reach, reach) for value in (disc.x, disc.y))
        highest = IMAGE_SIZE // CELL - WINDOW
        return tuple(min(max(round(v / CELL - WINDOW / 2), 0), highest) for v in centre)

    def sample(self, count: int) -> tuple[Tensor, list[list[tuple[int, int]]], Tensor]:
        """Noisy latents [N, 16, 16, 16], two window corners each, and windows [2N, 3, 56, 56]."""
        entries = self._rng.choices(self._entries, k=count)
        latents = torch.stack([latent for latent, _, _ in entries])
        latents = latents + LATENT_NOISE * self._deviation * torch.randn_like(latents)
        corners = [[self._corner(disc) for disc in layout] for _, _, layout in entries]
        side = WINDOW * CELL
        targets = [
            image[:, y * CELL : y * CELL + side, x * CELL : x * CELL + side]
            for (_, image, _), pair in zip(entries, corners, strict=True)
            for x, y in pair
        ]
        return latents, corners, torch.stack(targets)


def _decode_cells(decoder: QwenImageDecoder3d, cells: Tensor) -> Tensor:
    """The high-resolution half of the decoder: [N, 24, 1, h, w] -> float32 [N, 3, 4h, 4w]."""
    for block in decoder.up_blocks[1:]:
        cells = block(cells)
    return decoder.conv_out(decoder.nonlinearity(decoder.norm_out(cells)))[:, :, 0]


def cut_windows(
    autoencoder: AutoencoderKLQwenImage, latents: Tensor, corners: list[list[tuple[int, int]]]
) -> Tensor:
    """Decode halfway and cut: latents [N, 16, 16, 16] -> cells [2N, 24, 1, 14, 14]."""
    decoder = autoencoder.decoder
    whole = decoder.mid_block(decoder.conv_in(autoencoder.post_quant_conv(latents[:, :, None])))
    whole = decoder.up_blocks[0](whole)
    windows = [
        cells[:, :, row : row + WINDOW, column : column + WINDOW]
        for cells, pair in zip(whole, corners, strict=True)
        for column, row in pair
    ]
    return torch.stack(windows)


def sharpen_decoder(
    autoencoder: AutoencoderKLQwenImage,
    schedule: Schedule,
    batch_size: int,
    log: Callable[..., None],
    save: Callable[[AutoencoderKLQwenImage], None],
    seed: int,
) -> None:
    """Train the decoder on the CPU until the schedule ends; `save` gets the averaged weights.

    It is called now and then, too, so that a run of hours can be stopped at any time.
    """
    torch.manual_seed(seed)
    autoencoder.requires_grad_(False)
    parameters = [*autoencoder.decoder.parameters(), *autoencoder.post_quant_conv.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    average = deepcopy(autoencoder)
    averaged = [*average.decoder.parameters(), *average.post_quant_conv.parameters()]
    groups = [{"params": parameters, "weight_decay": 0.0}]
    optimizer, learning_rate = build_optimizer(groups, torch.device("cpu"))
    decode_cells = torch.compile(_decode_cells, dynamic=False)
    inner = slice(MARGIN * CELL, -MARGIN * CELL)
    steps_done = 0

    def step() -> dict[str, Tensor]:
        nonlocal steps_done
        optimizer.zero_grad(set_to_none=True)
        pool.grow(1)
        latents, corners, targets = pool.sample(batch_size)
        decoded = decode_cells(autoencoder.decoder, cut_windows(autoencoder, latents, corners))
        decoded, targets = decoded[:, :, inner, inner], targets[:, :, inner, inner]
        edge = sum(F.l1_loss(a, b) for a, b in zip(edges(decoded), edges(targets), strict=True))
        squared = F.mse_loss(decoded, targets)
        (F.l1_loss(decoded, targets) + squared + edge).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averaged, parameters, 1 - EMA_DECAY)
        steps_done += 1
        if steps_done % STEPS_PER_SAVE == 0:
            log(step=steps_done, psnr_db=psnr())
            save(deepcopy(average))
        return {"window_psnr_db": 10 * torch.log10(4 / squared.detach())}

    @torch.no_grad()
    def psnr() -> float:
        decoded = decode_images(average, latents_seen).clamp(-1, 1)
        return round(10 * math.log10(4 / F.mse_loss(decoded, images_seen).item()), 2)

    with single_frame_convolutions():
        held_back = ScenePool(autoencoder, seed + 1)
        held_back.grow(16)
        latents_seen, images_seen = held_back.contents()
        pool = ScenePool(autoencoder, seed)
        pool.grow(FIRST_SCENES)
        run_steps(step, schedule, learning_rate, PEAK_LEARNING_RATE, log)
        log(step=steps_done, psnr_db=psnr())
    save(average)
