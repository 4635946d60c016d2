"""A last stage for the decoder: sharper shapes from the latents as they are.

The encoder stays as it is, so nothing that was trained on its latents has to change.  The cheap
low-resolution half of the decoder runs on whole pictures, the dear high-resolution half only on
windows around the things; so this stage is quick enough for a CPU.
"""

import random
from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageDecoder3d
from torch import Tensor
from training.tiny_image.autoencoder import edges, encode_moments, single_frame_convolutions
from training.tiny_image.loop import Schedule
from training.tiny_image.muon import Muon
from training.tiny_image.render import batch_scenes, render
from training.tiny_image.scenes import GAP, IMAGE_SIZE, Disc, lay_out, random_training_scene

CELL = 4  # pixels per cell where the windows are cut: after the first of three upsamplings
WINDOW = 14  # cells per side of a window
LAST_CORNER = IMAGE_SIZE // CELL - WINDOW  # the furthest column or row a window can start at
MARGIN = 2  # cells at a window's border that lack their surroundings and so do not count
BORDER_SHARE = 0.15  # of the windows lie anywhere along the border of the picture
LARGE_SHARE = 0.3  # of the scenes that show a large thing are kept: small things need the practice
LATENT_NOISE = 0.08  # of a latent's deviation: about what the transformer leaves behind
KERNEL_RATE = 0.006  # Muon's learning rate, for convolutions
VECTOR_RATE = 6e-4  # Adam's, for everything else
EMA_DECAY = 0.995
FIRST_SCENES = 48  # encoded before the first step; every other step adds one more
STEPS_PER_LOG = 200
Corner = tuple[int, int]  # column and row of a window's first cell
Windows = tuple[Tensor, list[list[Corner]], Tensor, Tensor]


class ScenePool:
    """Growing collection of encoded scenes of two things each, on the CPU."""

    def __init__(self, autoencoder: AutoencoderKLQwenImage, seed: int) -> None:
        self._autoencoder = autoencoder
        self._rng = random.Random(seed)
        self._deviation = torch.tensor(autoencoder.config.latents_std).view(-1, 1, 1)
        self._entries: list[tuple[Tensor, Tensor, tuple[Disc, ...]]] = []

    def grow(self, count: int) -> None:
        """Encode `count` new scenes."""
        scenes = []
        while len(scenes) < count:
            scene = random_training_scene(self._rng)
            has_large = any(thing.size == "large" for thing in scene.things)
            if len(scene.things) == 2 and not (has_large and self._rng.random() > LARGE_SHARE):
                scenes.append(scene)
        layouts = [lay_out(scene, self._rng) for scene in scenes]
        images = render(batch_scenes(scenes, layouts))
        with torch.no_grad():
            latents, _ = encode_moments(self._autoencoder, images)
        self._entries += zip(latents, images, layouts, strict=True)

    def _corner(self, disc: Disc) -> Corner:
        """A window that shows some of the thing's outline, or any along the picture's border."""
        if self._rng.random() < BORDER_SHARE:
            along, side = self._rng.randint(0, LAST_CORNER), self._rng.choice((0, LAST_CORNER))
            return self._rng.choice(((along, side), (side, along)))
        reach = max(disc.radius - WINDOW * CELL / 4, GAP)
        centre = (value + self._rng.uniform(-reach, reach) for value in (disc.x, disc.y))
        return tuple(min(max(round(v / CELL - WINDOW / 2), 0), LAST_CORNER) for v in centre)

    def sample(self, count: int) -> Windows:
        """Noisy latents [N, 16, 16, 16], two corners each, windows and masks [2N, ., 56, 56]."""
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
        masks = [inner_mask(corner) for pair in corners for corner in pair]
        return latents, corners, torch.stack(targets), torch.stack(masks)


def inner_mask(corner: Corner) -> Tensor:
    """1 where a window's pixels count: all but its margins inside the picture.  [1, 56, 56]."""
    mask = torch.ones(1, WINDOW * CELL, WINDOW * CELL)
    for start, axis in zip(corner, (2, 1), strict=True):
        if start > 0:
            mask.narrow(axis, 0, MARGIN * CELL).zero_()
        if start < LAST_CORNER:
            mask.narrow(axis, (WINDOW - MARGIN) * CELL, MARGIN * CELL).zero_()
    return mask


def decode_cells(decoder: QwenImageDecoder3d, cells: Tensor) -> Tensor:
    """The high-resolution half of the decoder: [N, 24, 1, h, w] -> float32 [N, 3, 4h, 4w]."""
    for block in decoder.up_blocks[1:]:
        cells = block(cells)
    return decoder.conv_out(decoder.nonlinearity(decoder.norm_out(cells)))[:, :, 0]


def cut_windows(
    autoencoder: AutoencoderKLQwenImage, latents: Tensor, corners: list[list[Corner]]
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


def window_psnr(autoencoder: AutoencoderKLQwenImage, windows: Windows) -> float:
    """Peak signal-to-noise ratio in dB over the windows' inner pixels."""
    latents, corners, targets, masks = windows
    with torch.no_grad():
        decoded = decode_cells(autoencoder.decoder, cut_windows(autoencoder, latents, corners))
    squared = ((decoded.clamp(-1, 1) - targets) * masks).square().sum() / (3 * masks.sum())
    return round(10 * torch.log10(4 / squared).item(), 2)


def sharpen_decoder(
    autoencoder: AutoencoderKLQwenImage,
    schedule: Schedule,
    batch_size: int,
    log: Callable[..., None],
    save: Callable[[AutoencoderKLQwenImage], None],
    seed: int,
) -> None:
    """Train the decoder on the CPU until the schedule ends; `save` gets the averaged weights.

    It is called now and then, too, so that a long run can be stopped at any time.
    """
    torch.manual_seed(seed)
    autoencoder.requires_grad_(False)
    parameters = [*autoencoder.decoder.parameters(), *autoencoder.post_quant_conv.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    average = deepcopy(autoencoder)
    averaged = [*average.decoder.parameters(), *average.post_quant_conv.parameters()]
    kernels = [p for p in parameters if p.ndim >= 4 and min(p.shape[0], p[0].numel()) > 3]
    others = [p for p in parameters if all(p is not kernel for kernel in kernels)]
    muon, adam = Muon(kernels), torch.optim.Adam(others, betas=(0.9, 0.99))
    compiled = torch.compile(decode_cells, dynamic=False)

    with single_frame_convolutions():
        held_back = ScenePool(autoencoder, seed + 1)
        held_back.grow(24)
        control = held_back.sample(24)
        pool = ScenePool(autoencoder, seed)
        pool.grow(FIRST_SCENES)
        for step in schedule.steps():
            if step % 2:
                pool.grow(1)
            latents, corners, targets, masks = pool.sample(batch_size)
            decoded = compiled(autoencoder.decoder, cut_windows(autoencoder, latents, corners))
            ours, theirs = decoded * masks, targets * masks
            edge = sum(F.l1_loss(a, b) for a, b in zip(edges(ours), edges(theirs), strict=True))
            (F.l1_loss(ours, theirs) + F.mse_loss(ours, theirs) + edge).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            factor = schedule.learning_rate_factor()
            muon.step(KERNEL_RATE * factor)
            adam.param_groups[0]["lr"] = VECTOR_RATE * factor
            adam.step()
            for parameter in parameters:
                parameter.grad = None
            with torch.no_grad():
                torch._foreach_lerp_(averaged, parameters, 1 - EMA_DECAY)
            if step % STEPS_PER_LOG == 0:
                seconds = round(schedule.elapsed)
                log(step=step, seconds=seconds, window_psnr_db=window_psnr(average, control))
                save(deepcopy(average))
        log(step=step, window_psnr_db=window_psnr(average, control))
    save(average)
