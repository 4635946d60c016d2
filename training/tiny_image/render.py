"""Anti-aliased pictures of scenes, as batched tensor operations on any device.

Shapes are signed distance fields over (u, v): the offset from a shape's centre in units of its
radius, v pointing down.  Negative is inside; every shape just fits the square |u|, |v| <= 1.
"""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from training.tiny_image.scenes import COLOURS, IMAGE_SIZE, PALETTE, SHAPES, Disc, Scene, lay_out

Field = Callable[[Tensor, Tensor], Tensor]


def _circle(u: Tensor, v: Tensor) -> Tensor:
    return torch.hypot(u, v) - 1.0


def _square(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(u.abs(), v.abs()) - 1.0


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    flank = (2 * u.abs() - v - 1) / math.sqrt(5)
    return torch.maximum(flank, v - 1)


def _star(u: Tensor, v: Tensor) -> Tensor:
    """Five points, one up: fold the plane into one half-point and measure to its edge."""
    inner_radius = 0.45
    sector = 2 * math.pi / 5
    angle = torch.remainder(torch.atan2(u, -v) + sector / 2, sector) - sector / 2
    distance = torch.hypot(u, v)
    across, along = distance * angle.sin().abs(), distance * angle.cos()
    notch_across = inner_radius * math.sin(sector / 2)
    notch_along = inner_radius * math.cos(sector / 2)
    edge_length = math.hypot(notch_across, 1 - notch_along)
    return ((1 - notch_along) * across + notch_across * (along - 1)) / edge_length


def _ring(u: Tensor, v: Tensor) -> Tensor:
    return (torch.hypot(u, v) - 0.74).abs() - 0.26


def _cross(u: Tensor, v: Tensor) -> Tensor:
    half_width = 0.33
    upright = torch.maximum(u.abs() - half_width, v.abs() - 1)
    level = torch.maximum(u.abs() - 1, v.abs() - half_width)
    return torch.minimum(upright, level)


def _heart(u: Tensor, v: Tensor) -> Tensor:
    """Two round lobes over a point; exact distance up to scale."""
    scale = 0.25 + math.sqrt(2) / 4
    x, y = u.abs() * scale, 0.5518 - v * scale
    lobe = torch.hypot(x - 0.25, y - 0.75) - math.sqrt(2) / 4
    along_flank = 0.5 * (x + y).clamp(min=0)
    to_flank = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - along_flank, y - along_flank))
    return torch.where(x + y > 1, lobe, to_flank * torch.sign(x - y)) / scale


def _diamond(u: Tensor, v: Tensor) -> Tensor:
    return (u.abs() + v.abs() - 1) / math.sqrt(2)


FIELDS: dict[str, Field] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "heart": _heart,
    "diamond": _diamond,
}


@dataclass
class SceneBatch:
    """N laid-out scenes as tensors; a scene of one thing has an invisible second one.

    shape, colour: int64 [N, 2], indices into SHAPES and COLOURS.  background: int64 [N].
    disc: float32 [N, 2, 3], (x, y, radius) in pixels; radius 0 hides the thing.
    """

    shape: Tensor
    colour: Tensor
    background: Tensor
    disc: Tensor

    def __len__(self) -> int:
        return len(self.background)

    def __getitem__(self, rows: Tensor | slice) -> "SceneBatch":
        return SceneBatch(
            self.shape[rows], self.colour[rows], self.background[rows], self.disc[rows]
        )

    def to(self, device: torch.device | str) -> "SceneBatch":
        return SceneBatch(
            self.shape.to(device),
            self.colour.to(device),
            self.background.to(device),
            self.disc.to(device),
        )


def batch_scenes(scenes: Sequence[Scene], layouts: Sequence[Sequence[Disc]]) -> SceneBatch:
    """Stack laid-out scenes into tensors on the CPU."""
    hidden = (0.0, 0.0, 0.0)
    shape, colour, disc = [], [], []
    for scene, discs in zip(scenes, layouts, strict=True):
        things = scene.things if len(scene.things) == 2 else scene.things * 2
        shape.append([SHAPES.index(thing.shape) for thing in things])
        colour.append([COLOURS.index(thing.colour) for thing in things])
        disc.append([*discs, hidden][:2])
    background = [COLOURS.index(scene.background) for scene in scenes]
    return SceneBatch(
        torch.tensor(shape), torch.tensor(colour), torch.tensor(background), torch.tensor(disc)
    )


def coverage(shape: Tensor, disc: Tensor, size: int = IMAGE_SIZE) -> Tensor:
    """How much of each pixel a shape covers: shape [N], disc [N, 3] -> float32 [N, size, size]."""
    pixel = torch.arange(size, device=disc.device) + 0.5
    x, y, radius = (column[:, None, None] for column in disc.unbind(-1))
    divisor = radius.clamp(min=1e-3)
    u, v = (pixel[None, None, :] - x) / divisor, (pixel[None, :, None] - y) / divisor
    u, v = torch.broadcast_tensors(u, v)
    distance = torch.zeros_like(u)
    for index, name in enumerate(SHAPES):
        distance = torch.where((shape == index)[:, None, None], FIELDS[name](u, v), distance)
    return (0.5 - distance * radius).clamp(0, 1) * (radius > 0)


@functools.cache
def _palette(device: torch.device) -> Tensor:
    """float32 [12, 3] in -1..1, one row per colour."""
    return torch.tensor(list(PALETTE.values()), device=device) / 127.5 - 1


def render(batch: SceneBatch) -> Tensor:
    """Paint the batch: float32 [N, 3, 128, 128] in -1..1, on the batch's device."""
    palette = _palette(batch.disc.device)
    image = palette[batch.background][:, :, None, None].expand(-1, -1, IMAGE_SIZE, IMAGE_SIZE)
    for index in range(2):
        mask = coverage(batch.shape[:, index], batch.disc[:, index])[:, None]
        paint = palette[batch.colour[:, index]][:, :, None, None]
        image = torch.lerp(image, paint, mask)
    return image


def render_scene(scene: Scene, rng: random.Random) -> Tensor:
    """One laid-out scene as uint8 [128, 128, 3]."""
    image = render(batch_scenes([scene], [lay_out(scene, rng)]))[0]
    return ((image + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0)
