"""The prompt grammar: many ways to ask for a scene in English.

What a prompt leaves out has a fixed meaning: a medium size, the centre of the picture, a white
background (black behind white things).  Words outside the grammar carry no meaning.
"""

import random
import string
from typing import NamedTuple

from training.tiny_image.scenes import PLACES, RELATIONS, Scene, Thing, default_background

COLOUR_WORDS = {"gray": ("gray", "gray", "grey"), "purple": ("purple", "purple", "violet")}
SHAPE_WORDS = {
    "circle": ("circle",) * 8 + ("disc", "disk"),
    "ring": ("ring",) * 8 + ("donut",),
    "cross": ("cross",) * 8 + ("plus", "plus sign"),
    "diamond": ("diamond",) * 8 + ("rhombus",),
}
SIZE_WORDS = {
    "small": ("small", "small", "small", "little", "tiny"),
    "medium": ("medium", "medium", "medium-sized"),
    "large": ("large", "large", "large", "big", "huge"),
}
CORNER_FORMS = (
    "in the {}",
    "in the {} corner",
    "at the {}",
    "on the {}",
    "at the {} corner",
    "{}",
    "in {}",
)
PLACE_FORMS = {
    "top": ("at the top", "at the top", "in the top", "near the top", "top", "on the top"),
    "bottom": ("at the bottom", "at the bottom", "in the bottom", "near the bottom", "bottom"),
    "left": (
        "on the left",
        "on the left",
        "on the left side",
        "at the left",
        "to the left",
        "left",
    ),
    "right": (
        "on the right",
        "on the right",
        "on the right side",
        "at the right",
        "to the right",
        "right",
    ),
    "center": (
        "in the center",
        "in the middle",
        "at the center",
        "in the centre",
        "centered",
        "center",
    ),
}
BACKGROUND_FORMS = (
    "on a {} background",
    "on a {} background",
    "on {}",
    "with a {} background",
    "against a {} background",
    "on the {} background",
    "{} background",
    "over a {} background",
)
RELATION_WORDS = {
    ("top", "bottom"): ("above", "above", "over", "on top of", "is above", "right above"),
    ("bottom", "top"): ("below", "below", "under", "beneath", "underneath", "is below"),
    ("left", "right"): ("left of", "to the left of", "on the left of", "is left of"),
    ("right", "left"): ("right of", "to the right of", "on the right of", "is right of"),
}
SIDE_BY_SIDE_WORDS = ("and", "and", "and", "next to", "beside", "with")
LEADS = (
    "a picture of",
    "an image of",
    "a drawing of",
    "a photo of",
    "an illustration of",
    "a painting of",
    "draw",
    "paint",
    "show",
    "show me",
    "generate",
    "create",
    "please draw",
    "there is",
)
MEANINGLESS = (
    "beautiful",
    "nice",
    "shiny",
    "cute",
    "simple",
    "flat",
    "lovely",
    "bright",
    "solid",
    "filled",
    "perfect",
    "colorful",
    "single",
    "plain",
    "geometric",
)
TAILS = ("high quality", "4k", "minimal", "flat design", "vector art", "no text", "sharp", "please")
STRANGERS = ("a cat", "a dog on a sofa", "hello", "sunset over the sea", "my house", "test", "?")


class Request(NamedTuple):
    """A prompt and the scene that it asks for."""

    prompt: str
    scene: Scene


def _with_article(noun: str, rng: random.Random) -> str:
    article = "an" if noun[0] in "aeiou" else "a"
    return " ".join(rng.choices((f"{article} {noun}", noun, f"the {noun}"), (75, 20, 5))[0].split())


def _meaningless_word(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(MEANINGLESS)
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 7)))


def _noun(thing: Thing, rng: random.Random, *, plural: bool = False) -> str:
    """The thing's size, colour and shape; a medium size mostly goes without saying."""
    colour = rng.choice(COLOUR_WORDS.get(thing.colour, (thing.colour,)))
    shape = rng.choice(SHAPE_WORDS.get(thing.shape, (thing.shape,)))
    if plural:
        shape += "es" if shape.endswith(("s", "x")) else "s"
    words = [colour, shape]
    if thing.size != "medium" or rng.random() < 0.25:
        words.insert(0 if rng.random() < 0.92 else 1, rng.choice(SIZE_WORDS[thing.size]))
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words)), _meaningless_word(rng))
    if not plural and rng.random() < 0.04 and colour in words:
        words.remove(colour)
        words.append(rng.choice(("that is {}", "in {}", "colored {}")).format(colour))
    return " ".join(words)


def _place_phrase(place: str, rng: random.Random) -> str:
    if place in PLACE_FORMS:
        return rng.choice(PLACE_FORMS[place])
    row, column = place.split()
    row = rng.choice((row, row, row, {"top": "upper", "bottom": "lower"}[row]))
    joint = "-" if rng.random() < 0.15 else " "
    return rng.choice(CORNER_FORMS).format(f"{row}{joint}{column}")


def _background_phrase(background: str, rng: random.Random) -> str:
    colour = rng.choice(COLOUR_WORDS.get(background, (background,)))
    phrase = rng.choice(BACKGROUND_FORMS).format(colour)
    return phrase.replace("a orange", "an orange")


def _one_thing(thing: Thing, rng: random.Random) -> str:
    text = _with_article(_noun(thing, rng), rng)
    if thing.place == "center" and rng.random() < 0.75:
        return text
    joint = rng.choices((" ", ", "), (80, 20))[0]
    return f"{text}{joint}{_place_phrase(thing.place, rng)}"


def _two_things(first: Thing, second: Thing, rng: random.Random) -> str:
    if first._replace(place=second.place) == second:
        return f"two {_noun(first, rng, plural=True)}"
    places = (first.place, second.place)
    nouns = [_with_article(_noun(thing, rng), rng) for thing in (first, second)]
    if places == RELATIONS["left of"] and rng.random() < 0.35:
        return f" {rng.choice(SIDE_BY_SIDE_WORDS)} ".join(nouns)
    if places in RELATION_WORDS and rng.random() < 0.85:
        return f" {rng.choice(RELATION_WORDS[places])} ".join(nouns)
    placed = [
        f"{noun} {_place_phrase(place, rng)}" for noun, place in zip(nouns, places, strict=True)
    ]
    return rng.choice((" and ", " and ", ", ")).join(placed)


def _in_some_case(text: str, rng: random.Random) -> str:
    how = rng.choices((str, str.capitalize, str.title, str.upper), (75, 16, 4, 5))[0]
    return how(text)


def write_prompt(scene: Scene, rng: random.Random) -> str:
    """Ask for the scene in one of the grammar's many ways."""
    text = (_one_thing if len(scene.things) == 1 else _two_things)(*scene.things, rng)
    colours = {thing.colour for thing in scene.things}
    if scene.background != default_background(colours) or rng.random() < 0.35:
        background = _background_phrase(scene.background, rng)
        if rng.random() < 0.08:
            text = f"{background}, {text}"
        else:
            text += rng.choices((" ", ", "), (80, 20))[0] + background
    if rng.random() < 0.22:
        text = f"{rng.choice(LEADS)} {text}"
    if rng.random() < 0.04:
        text += f", {rng.choice(TAILS)}"
    if rng.random() < 0.12:
        text += rng.choice((".", ".", "!"))
    return _in_some_case(text, rng)


def write_vague_prompt(scene: Scene, rng: random.Random) -> str:
    """Leave the only thing's colour or shape to the model."""
    (thing,) = scene.things
    size = "" if thing.size == "medium" else f"{thing.size} "
    noun = rng.choice((thing.shape, thing.shape, f"{thing.colour} shape", f"{thing.colour} thing"))
    place = "" if thing.place == "center" else f" {_place_phrase(thing.place, rng)}"
    return f"a {size}{noun}{place} {_background_phrase(scene.background, rng)}"


def training_prompt(scene: Scene, rng: random.Random) -> str:
    """A prompt for training: now and then vague, foreign to the grammar, or empty."""
    draw = rng.random()
    if draw < 0.05:
        return rng.choice(("", "", "", " "))
    if draw < 0.06:
        return rng.choice(STRANGERS)
    if draw < 0.10 and len(scene.things) == 1:
        return write_vague_prompt(scene, rng)
    return write_prompt(scene, rng)


def grammar_words() -> list[str]:
    """Every word of the grammar, in lower case: what the tokenizer must know whole."""
    tables = (COLOUR_WORDS, SHAPE_WORDS, SIZE_WORDS, PLACE_FORMS, RELATION_WORDS)
    phrases = [phrase for table in tables for forms in table.values() for phrase in forms]
    phrases += [*BACKGROUND_FORMS, *LEADS, *MEANINGLESS, *TAILS, *CORNER_FORMS, *PLACES]
    words = {word for phrase in phrases for word in phrase.split() if word.isalpha()}
    return sorted(words | {"a", "an", "the", "two", "shape", "thing", "upper", "lower"})
