"""The picture checker: right on true renders, and not fooled by wrong ones."""

import random

import numpy as np
import pytest
from training.tiny_image.checker import Verdict, judge, read_picture
from training.tiny_image.render import render_scene
from training.tiny_image.scenes import (
    COLOURS,
    PLACES,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    is_held_out,
    random_held_out_scene,
    random_scene,
    random_training_scene,
)

RED_CIRCLE = Scene((Thing("red", "circle", "medium", "center"),), "white")
PAIR = Scene(
    (Thing("red", "circle", "small", "top"), Thing("blue", "square", "large", "bottom")), "yellow"
)


def verdict_on(asked: Scene, shown: Scene, seed: int = 0) -> Verdict:
    return judge(asked, read_picture(render_scene(shown, random.Random(seed)).numpy()))


def wrong_attributes(verdict: Verdict) -> set[str]:
    return {name for name in Verdict._fields if not getattr(verdict, name)}


def with_thing(scene: Scene, **changes: str) -> Scene:
    first, *others = scene.things
    return scene._replace(things=(first._replace(**changes), *others))


@pytest.mark.parametrize("count", [1, 2])
def test_true_renders_are_right(count: int) -> None:
    rng = random.Random(count)
    scenes = [random_scene(rng, count) for _ in range(150)]
    exact = [verdict_on(scene, scene, seed).exact for seed, scene in enumerate(scenes)]
    assert np.mean(exact) >= 0.99


@pytest.mark.parametrize("scene", [RED_CIRCLE, PAIR])
@pytest.mark.parametrize(
    ("attribute", "field", "values"),
    [
        ("colour", "colour", COLOURS),
        ("shape", "shape", SHAPES),
        ("size", "size", SIZES),
    ],
)
def test_each_wrong_attribute_is_caught(
    scene: Scene, attribute: str, field: str, values: tuple[str, ...]
) -> None:
    right = getattr(scene.things[0], field)
    for wrong in set(values) - {right, scene.background}:
        shown = with_thing(scene, **{field: wrong})
        assert wrong_attributes(verdict_on(scene, shown)) == {attribute}


def test_each_wrong_place_is_caught() -> None:
    for place in set(PLACES) - {"center"}:
        shown = with_thing(RED_CIRCLE, place=place)
        assert wrong_attributes(verdict_on(RED_CIRCLE, shown)) == {"position"}


def test_each_wrong_background_is_caught() -> None:
    for background in set(COLOURS) - {"white", "red"}:
        shown = RED_CIRCLE._replace(background=background)
        assert wrong_attributes(verdict_on(RED_CIRCLE, shown)) == {"background"}


def test_a_turned_relation_is_caught() -> None:
    first, second = PAIR.things
    for places in (("bottom", "top"), ("left", "right"), ("right", "left")):
        things = (first._replace(place=places[0]), second._replace(place=places[1]))
        assert "position" in wrong_attributes(verdict_on(PAIR, PAIR._replace(things=things)))


def test_swapped_colours_are_caught() -> None:
    first, second = PAIR.things
    things = (first._replace(colour="blue"), second._replace(colour="red"))
    assert not verdict_on(PAIR, PAIR._replace(things=things)).colour


def test_a_missing_or_an_extra_thing_is_caught() -> None:
    alone = PAIR._replace(things=PAIR.things[:1])
    assert not verdict_on(PAIR, alone).count
    assert not verdict_on(alone, PAIR).count


def test_noise_is_no_picture() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    assert not judge(RED_CIRCLE, read_picture(noise)).exact


def test_debris_is_caught() -> None:
    picture = render_scene(RED_CIRCLE, random.Random(0)).numpy()
    picture[4:124:4, 4:36:8] = 0
    assert wrong_attributes(judge(RED_CIRCLE, read_picture(picture))) == {"clean"}


def test_training_and_held_out_scenes_do_not_meet() -> None:
    rng = random.Random(0)
    assert not any(is_held_out(random_training_scene(rng)) for _ in range(300))
    assert all(is_held_out(random_held_out_scene(rng, 1 + i % 2)) for i in range(300))
