"""What a picture may show: the closed world of attributes, scenes and the held-out combinations.

A scene is one or two flat shapes on a plain background.  Every shape has a colour, a size and a
place on a 3x3 grid, so a relation such as "above" is just a pair of places ("top", "bottom").
"""

import random
import zlib
from typing import NamedTuple

IMAGE_SIZE = 128  # pixels per side

PALETTE: dict[str, tuple[int, int, int]] = {  # sRGB, 0..255
    "red": (220, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (250, 220, 50),
    "green": (50, 160, 70),
    "cyan": (60, 200, 220),
    "blue": (45, 85, 205),
    "purple": (130, 60, 170),
    "pink": (250, 150, 190),
    "brown": (120, 75, 40),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
    "gray": (140, 140, 140),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "diamond")

# Half the side of a shape's bounding box, in pixels.
RADIUS_RANGES = {"small": (9.0, 11.5), "medium": (15.5, 18.5), "large": (24.0, 27.0)}
SIZES = tuple(RADIUS_RANGES)

# Column and row of each place: -1 is left or top, +1 is right or bottom.
PLACES: dict[str, tuple[int, int]] = {
    "top left": (-1, -1),
    "top": (0, -1),
    "top right": (1, -1),
    "left": (-1, 0),
    "center": (0, 0),
    "right": (1, 0),
    "bottom left": (-1, 1),
    "bottom": (0, 1),
    "bottom right": (1, 1),
}
GRID_STEP = 30.0  # pixels between neighbouring places
PLACE_JITTER = 6.0  # pixels, either way, on each axis
CANVAS_MARGIN = 2.0  # pixels kept free between a shape and the edge of the picture
GAP = 4.0  # pixels kept free between two shapes

RELATIONS: dict[str, tuple[str, str]] = {
    "above": ("top", "bottom"),
    "below": ("bottom", "top"),
    "left of": ("left", "right"),
    "right of": ("right", "left"),
}

HELD_OUT_PERCENT = 10


class Thing(NamedTuple):
    """One shape, by name; every field is a key of the tables above."""

    colour: str
    shape: str
    size: str
    place: str


class Scene(NamedTuple):
    """What a prompt asks for: one or two things on a plain background."""

    things: tuple[Thing, ...]
    background: str


class Disc(NamedTuple):
    """Where a thing lands on the canvas: centre and half bounding box, in pixels."""

    x: float
    y: float
    radius: float


def default_background(colours: set[str]) -> str:
    """The background of a prompt that names none: white, or what white things stand out on."""
    return next(shade for shade in ("white", "black", "gray") if shade not in colours)


def _falls_in_held_out_bucket(*words: str) -> bool:
    return zlib.crc32(" ".join(words).encode()) % 100 < HELD_OUT_PERCENT


def is_held_out(scene: Scene) -> bool:
    """True when training never sees the scene's combination of attributes.

    Held out are a tenth of all (colour, shape, background) triples, in any picture, and a tenth of
    all unordered pairs of (colour, shape).
    """
    looks = [f"{thing.colour} {thing.shape}" for thing in scene.things]
    if any(_falls_in_held_out_bucket(look, "on", scene.background) for look in looks):
        return True
    return len(looks) == 2 and _falls_in_held_out_bucket(*sorted(looks))


def _random_thing(rng: random.Random, place: str) -> Thing:
    size = rng.choices(SIZES, weights=(3, 4, 3))[0]
    return Thing(rng.choice(COLOURS), rng.choice(SHAPES), size, place)


def _random_place_pair(rng: random.Random) -> tuple[str, str]:
    """Two places on opposite sides of the canvas along at least one axis."""
    while True:
        first, second = rng.sample(list(PLACES), 2)
        (x1, y1), (x2, y2) = PLACES[first], PLACES[second]
        if max(abs(x1 - x2), abs(y1 - y2)) == 2:
            return first, second


def random_things(rng: random.Random, count: int) -> tuple[Thing, ...]:
    """One thing anywhere, or two that differ in look and do not overlap."""
    if count == 1:
        place = "center" if rng.random() < 0.3 else rng.choice(list(PLACES))
        return (_random_thing(rng, place),)
    if rng.random() < 0.65:
        places = rng.choice(list(RELATIONS.values()))
    else:
        places = _random_place_pair(rng)
    first, second = (_random_thing(rng, place) for place in places)
    while (first.colour, first.shape) == (second.colour, second.shape):
        second = _random_thing(rng, second.place)
    return first, second


def random_twins(rng: random.Random) -> tuple[Thing, Thing]:
    """Two equal things side by side."""
    left = _random_thing(rng, "left")
    return left, left._replace(place="right")


def random_scene(rng: random.Random, count: int | None = None) -> Scene:
    """Draw a scene of `count` things (1 or 2; None draws the count too)."""
    count = count or rng.choice((1, 2))
    if count == 2 and rng.random() < 0.08:
        things = random_twins(rng)
    else:
        things = random_things(rng, count)
    colours = {thing.colour for thing in things}
    if rng.random() < 0.35:
        return Scene(things, default_background(colours))
    return Scene(things, rng.choice([colour for colour in COLOURS if colour not in colours]))


def random_training_scene(rng: random.Random) -> Scene:
    """Draw until the scene is one that training may see."""
    while is_held_out(scene := random_scene(rng)):
        pass
    return scene


def random_held_out_scene(rng: random.Random, count: int) -> Scene:
    """Draw until the scene is one that training never sees."""
    while not is_held_out(scene := random_scene(rng, count)):
        pass
    return scene


def _random_disc(thing: Thing, rng: random.Random) -> Disc:
    radius = rng.uniform(*RADIUS_RANGES[thing.size])
    lowest, highest = radius + CANVAS_MARGIN, IMAGE_SIZE - radius - CANVAS_MARGIN
    centre = (
        IMAGE_SIZE / 2 + GRID_STEP * cell + rng.uniform(-PLACE_JITTER, PLACE_JITTER)
        for cell in PLACES[thing.place]
    )
    x, y = (min(max(value, lowest), highest) for value in centre)
    return Disc(x, y, radius)


def lay_out(scene: Scene, rng: random.Random) -> tuple[Disc, ...]:
    """Jitter the scene's things around their places, keeping a gap between them."""
    while True:
        discs = tuple(_random_disc(thing, rng) for thing in scene.things)
        if len(discs) == 1:
            return discs
        first, second = discs
        distance = max(abs(first.x - second.x), abs(first.y - second.y))
        if distance >= first.radius + second.radius + GAP:
            return discs
