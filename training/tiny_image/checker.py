"""Read a picture back: which shapes it shows, from its pixels alone.

Deterministic and independent of the model: palette distances, connected components, and the overlap
of each component with the exact outline of every shape.
"""

from collections import deque
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
from training.tiny_image.render import coverage
from training.tiny_image.scenes import (
    IMAGE_SIZE,
    PALETTE,
    PLACES,
    RADIUS_RANGES,
    RELATIONS,
    SHAPES,
    Scene,
    Thing,
)

COLOUR_TOLERANCE = 45.0  # largest RGB distance at which a colour still is a palette colour
FOREGROUND_DISTANCE = 30.0  # smallest RGB distance from the background that can be a shape
SPECK_AREA = 30  # pixels: smaller components are noise, as long as they stay few
SPECK_BUDGET = 60  # pixels of specks that a clean picture may have in all
OUTLINE_SIZE = 32  # pixels per side of the normalised masks that shapes are compared on
OUTLINE_OVERLAP = 0.75  # smallest intersection over union with the best outline
UNKNOWN = "unknown"


class Reading(NamedTuple):
    """What a picture shows; a thing's fields are `unknown` where nothing fits."""

    things: tuple[Thing, ...]
    background: str
    is_clean: bool  # no debris beside the things


class Verdict(NamedTuple):
    """Which of a scene's attributes the picture got right, over all its things."""

    count: bool
    colour: bool
    shape: bool
    size: bool
    position: bool
    background: bool
    clean: bool

    @property
    def exact(self) -> bool:
        return all(self)


def name_colour(rgb: np.ndarray) -> str:
    """The palette colour nearest to `rgb` (3 values, 0..255), if any is near."""
    distances = {name: np.linalg.norm(rgb - np.array(value)) for name, value in PALETTE.items()}
    nearest = min(distances, key=distances.get)
    return nearest if distances[nearest] <= COLOUR_TOLERANCE else UNKNOWN


def connected_components(mask: np.ndarray) -> list[np.ndarray]:
    """The 4-connected components of a bool mask, as index arrays [K, 2] of (row, column)."""
    waiting = {(int(row), int(column)) for row, column in np.argwhere(mask)}
    components = []
    while waiting:
        queue = deque([waiting.pop()])
        component = []
        while queue:
            row, column = queue.popleft()
            component.append((row, column))
            around = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
            for neighbour in around:
                if neighbour in waiting:
                    waiting.remove(neighbour)
                    queue.append(neighbour)
        components.append(np.array(component))
    return components


def _normalised(mask: np.ndarray) -> np.ndarray:
    """Stretch a bool mask's bounding box onto a 32x32 bool mask."""
    rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    grid = torch.nn.functional.interpolate(
        torch.from_numpy(box)[None, None].float(), size=(OUTLINE_SIZE, OUTLINE_SIZE), mode="area"
    )
    return grid[0, 0].numpy() >= 0.5


def _outlines() -> dict[str, np.ndarray]:
    centre = IMAGE_SIZE / 2
    disc = torch.tensor([[centre, centre, 50.0]]).expand(len(SHAPES), -1)
    masks = coverage(torch.arange(len(SHAPES)), disc) >= 0.5
    return {name: _normalised(mask.numpy()) for name, mask in zip(SHAPES, masks, strict=True)}


OUTLINES = _outlines()


def name_shape(mask: np.ndarray) -> str:
    """The shape whose outline overlaps most with a bool mask, if any overlaps enough."""
    outline = _normalised(mask)
    overlaps = {
        name: (outline & known).sum() / (outline | known).sum() for name, known in OUTLINES.items()
    }
    best = max(overlaps, key=overlaps.get)
    return best if overlaps[best] >= OUTLINE_OVERLAP else UNKNOWN


def name_size(radius: float) -> str:
    """The size whose range is nearest to half the longer side of a bounding box, in pixels."""
    return min(RADIUS_RANGES, key=lambda name: abs(radius - sum(RADIUS_RANGES[name]) / 2))


def name_place(x: float, y: float) -> str:
    """The cell of the 3x3 grid around a point, in pixels."""
    third = 15.0  # pixels from the middle to the border between two cells
    middle = IMAGE_SIZE / 2
    cell = tuple(int(v > middle + third) - int(v < middle - third) for v in (x, y))
    return next(name for name, place in PLACES.items() if place == cell)


def _read_thing(image: np.ndarray, component: np.ndarray, background: np.ndarray) -> Thing:
    """Describe the thing that a component (index array [K, 2]) is made of."""
    colour = np.median(image[component[:, 0], component[:, 1]], axis=0)
    candidates = np.zeros(image.shape[:2], dtype=bool)
    candidates[component[:, 0], component[:, 1]] = True
    nearer = np.linalg.norm(image - colour, axis=-1) < np.linalg.norm(image - background, axis=-1)
    mask = candidates & nearer
    if not mask.any():
        mask = candidates
    (top, left), (bottom, right) = np.argwhere(mask).min(0), np.argwhere(mask).max(0)
    radius = max(bottom - top + 1, right - left + 1) / 2
    place = name_place((left + right + 1) / 2, (top + bottom + 1) / 2)
    return Thing(name_colour(colour), name_shape(mask), name_size(radius), place)


def read_picture(image: np.ndarray) -> Reading:
    """Describe a uint8 picture [128, 128, 3]."""
    pixels = image.astype(np.float64)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background = np.median(border, axis=0)
    foreground = np.linalg.norm(pixels - background, axis=-1) > FOREGROUND_DISTANCE
    components = connected_components(foreground)
    solid = [component for component in components if len(component) >= SPECK_AREA]
    debris = sum(len(component) for component in components if len(component) < SPECK_AREA)
    things = tuple(_read_thing(pixels, component, background) for component in solid)
    return Reading(things, name_colour(background), debris <= SPECK_BUDGET)


def _right_place(asked: tuple[Thing, ...], seen: tuple[Thing, ...]) -> bool:
    """Places must match; of a related pair ("above", ...) only the relation must."""
    if tuple(thing.place for thing in asked) not in RELATIONS.values():
        return all(a.place == s.place for a, s in zip(asked, seen, strict=True))
    (ax, ay), (bx, by) = (PLACES[thing.place] for thing in asked)
    (sx, sy), (tx, ty) = (PLACES[thing.place] for thing in seen)
    wanted, got = (ax - bx, ay - by), (sx - tx, sy - ty)
    main, cross = (0, 1) if wanted[0] else (1, 0)
    return got[main] * wanted[main] > 0 and abs(got[cross]) < abs(got[main])


def judge(scene: Scene, reading: Reading) -> Verdict:
    """Compare a picture with the scene asked for, pairing the things in the best order."""

    def verdict(seen: tuple[Thing, ...]) -> Verdict:
        pairs = list(zip(scene.things, seen, strict=True))
        return Verdict(
            count=True,
            colour=all(a.colour == s.colour for a, s in pairs),
            shape=all(a.shape == s.shape for a, s in pairs),
            size=all(a.size == s.size for a, s in pairs),
            position=_right_place(scene.things, seen),
            background=reading.background == scene.background,
            clean=reading.is_clean,
        )

    if len(reading.things) != len(scene.things):
        background = reading.background == scene.background
        return Verdict(False, False, False, False, False, background, reading.is_clean)
    return max((verdict(order) for order in permutations(reading.things)), key=sum)
